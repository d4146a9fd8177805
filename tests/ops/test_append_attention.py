"""append_attention against its NumPy reference: what is written is the same bit for bit, what is attended is close."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from pathlib import Path

import numpy as np
import paddle
import pytest
from helpers.ops_cases import (
    MODEL_DTYPES,
    QUANT_TYPES,
    STORAGES,
    assert_close,
    fill_context,
    make_batch,
    make_twin,
    model_rows,
    paddle_batch,
    rope_tables,
    run_both,
    to_array,
    to_paddle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv.errors import ConfigError
from fastkv.ops import Rope, append_attention, attention
from fastkv.ops import reference as ref
from fastkv.ops._load import run_op

RAGGED = ([1, 5, 0, 3], [7, 0, 4, 6])
"""Query and context lengths: decode, prefill, an idle request, verification of three tokens."""


@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
def test_ragged_batch_matches_reference(rng: np.random.Generator, isa: str, quant_type: str, model_dtype: str) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, quant_type, model_dtype, blocks=12, dim=24), batch)
    out, expected = run_both(rng, twin, batch, group=3)
    assert_close(out, expected, model_dtype)


@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
@pytest.mark.parametrize("per_head", [False, True], ids=["channel", "head"])
def test_registered_op_gives_the_bytes_of_the_direct_call(
    rng: np.random.Generator, quant_type: str, model_dtype: str, per_head: bool
) -> None:
    """The Python face goes around Paddle's dispatch; exported programs call the op. Same output, same cache."""
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, quant_type, model_dtype, blocks=12, dim=16, per_head=per_head), batch)
    tokens, rope = len(batch.slot_mapping), rope_tables(16, "interleaved")
    q, k, v = (to_paddle(model_rows(rng, (tokens, heads, 16), model_dtype)) for heads in (4, 2, 2))
    cos, sin, sinks = (to_paddle(x) for x in (rope.cos, rope.sin, rng.standard_normal(4).astype(np.float32)))
    parts = paddle_batch(batch)
    inputs = (parts.block_tables, parts.query_start, parts.context_lens, parts.slot_mapping, cos, sin, sinks)
    options = {"rope": Rope(cos, sin, "interleaved"), "window": 5, "sinks": sinks, "softmax_scale": 0.3}
    direct = append_attention(q, k, v, twin.layer, parts, **options)
    written = [to_array(x).copy() for x in (twin.layer.key, twin.layer.value)]
    for tensor in (twin.layer.key, twin.layer.value):
        slots = batch.slot_mapping[batch.slot_mapping >= 0]
        tensor[to_paddle(slots // 4), :, to_paddle(slots % 4)] = 0
    out = run_op("fastkv_append_attention", q, k, v, *twin.layer.op_inputs, *inputs, quant_type, 0.3, "interleaved", 5)[
        0
    ]
    np.testing.assert_array_equal(to_array(out), to_array(direct))
    for tensor, expected in zip((twin.layer.key, twin.layer.value), written, strict=True):
        np.testing.assert_array_equal(to_array(tensor), expected)


def test_call_that_fits_needs_no_dispatch(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The direct call is worth nothing if something small makes every call fall back to the op."""
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, "int8", blocks=12, dim=16), batch)
    monkeypatch.setattr(attention, "run_op", None)
    options = {"window": np.int64(3), "softmax_scale": np.float32(0.25), "sinks": np.zeros(4, np.float32)}
    run_both(rng, twin, batch, group=2, rope=rope_tables(16, "neox"), **options)


@pytest.mark.parametrize("model_dtype", MODEL_DTYPES)
def test_out_receives_the_result_and_is_returned(rng: np.random.Generator, model_dtype: str) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, "int8", model_dtype, blocks=12, dim=16), batch)
    tokens = len(batch.slot_mapping)
    q, k, v = (to_paddle(model_rows(rng, (tokens, heads, 16), model_dtype)) for heads in (4, 2, 2))
    expected = append_attention(q, k, v, twin.layer, paddle_batch(batch), softmax_scale=0.3)
    out = paddle.full([tokens, 4, 16], 7, model_dtype)
    result = append_attention(q, k, v, twin.layer, paddle_batch(batch), softmax_scale=0.3, out=out)
    assert result.data_ptr() == out.data_ptr()
    np.testing.assert_array_equal(to_array(out), to_array(expected))


def test_out_that_does_not_fit_is_refused_before_anything_is_written(rng: np.random.Generator) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, blocks=12, dim=16), batch)
    tokens, before = len(batch.slot_mapping), to_array(twin.layer.key).copy()
    q, k, v = (to_paddle(model_rows(rng, (tokens, 2, 16), "float32")) for _ in range(3))
    wrong: list[tuple[object, str]] = [
        (paddle.zeros([tokens, 2, 8]), r"out must be float32 \[\d+, 2, 16\]"),
        (paddle.zeros([tokens, 2, 16], "bfloat16"), "out must be float32"),
        (paddle.zeros([tokens, 16, 2]).transpose([0, 2, 1]), "out.*not contiguous"),
        (np.zeros((tokens, 2, 16), np.float32), "out must be a Paddle tensor"),
        (q, "memory of q, k or v"),
    ]
    for out, message in wrong:
        with pytest.raises(ConfigError, match=message):
            append_attention(q, k, v, twin.layer, paddle_batch(batch), softmax_scale=0.3, out=out)
    np.testing.assert_array_equal(to_array(twin.layer.key), before)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("model_dtype", MODEL_DTYPES)
@pytest.mark.parametrize("per_head", [False, True], ids=["channel", "head"])
def test_quantised_cache_serves_every_model_dtype_and_granularity(
    rng: np.random.Generator, quant_type: str, model_dtype: str, per_head: bool
) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, quant_type, model_dtype, blocks=12, dim=8, per_head=per_head), batch)
    out, expected = run_both(rng, twin, batch, group=2)
    assert_close(out, expected, model_dtype)


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 96, 128, 192, 256])
def test_head_dim_matches_reference(rng: np.random.Generator, isa: str, dim: int) -> None:
    batch = make_batch(rng, [2, 70], [9, 0], block_size=16, num_blocks=8)
    twin = fill_context(rng, make_twin(rng, dim=dim, block_size=16), batch)
    out, expected = run_both(rng, twin, batch, group=2, softmax_scale=dim**-0.5)
    assert_close(out, expected, "float32")


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 16), (3, 3), (4, 2), (2, 7)])
def test_head_counts_match_reference(rng: np.random.Generator, kv_heads: int, group: int) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, blocks=12, kv_heads=kv_heads), batch)
    out, expected = run_both(rng, twin, batch, group=group)
    assert_close(out, expected, "float32")


@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
def test_value_head_dim_of_its_own_matches_reference(
    rng: np.random.Generator, quant_type: str, model_dtype: str
) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, quant_type, model_dtype, blocks=12, dim=24, value_dim=16), batch)
    out, expected = run_both(rng, twin, batch, group=2)
    assert list(out.shape) == [9, 4, 16]
    assert_close(out, expected, model_dtype)


@pytest.mark.parametrize("style", ["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("quant_type", ["none", "int8", "block_wise_fp8"])
def test_rotary_in_the_op_matches_reference(
    rng: np.random.Generator, isa: str, style: str, rotary_dim: int, quant_type: str
) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, quant_type, blocks=12), batch)
    out, expected = run_both(rng, twin, batch, group=2, rope=rope_tables(rotary_dim, style))
    assert_close(out, expected, "float32")


@pytest.mark.parametrize("window", [1, 2, 4, 5, 100])
def test_window_matches_reference(rng: np.random.Generator, window: int) -> None:
    batch = make_batch(rng, [1, 9, 3], [15, 0, 8], block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, blocks=12), batch)
    out, expected = run_both(rng, twin, batch, group=2, window=window)
    assert_close(out, expected, "float32")


def test_window_needs_only_the_blocks_it_touches(rng: np.random.Generator) -> None:
    """A sliding-window engine gives blocks back once the window has passed: their table entries are -1."""
    batch = make_batch(rng, [1], [15], block_size=4, num_blocks=8)
    twin = fill_context(rng, make_twin(rng), batch)
    batch.block_tables[0, :3] = -1
    out, expected = run_both(rng, twin, batch, group=1, window=4)
    assert_close(out, expected, "float32")


def test_sinks_match_reference(rng: np.random.Generator) -> None:
    batch = make_batch(rng, *RAGGED, block_size=4, num_blocks=12)
    twin = fill_context(rng, make_twin(rng, blocks=12), batch)
    sinks = np.array([0.5, -np.inf, 30.0, -2.0], np.float32)
    out, expected = run_both(rng, twin, batch, group=2, sinks=sinks)
    assert_close(out, expected, "float32")


@pytest.mark.parametrize("context", [0, 1, 3, 4, 5, 63, 64, 65])
@pytest.mark.parametrize("queries", [1, 2, 4, 66])
def test_block_and_chunk_edges_match_reference(rng: np.random.Generator, context: int, queries: int) -> None:
    """The kernel walks chunks of 64 positions and tiles of 64 rows: lengths at and around both, and around blocks."""
    batch = make_batch(rng, [queries], [context], block_size=4, num_blocks=40)
    twin = fill_context(rng, make_twin(rng, blocks=40, kv_heads=1, dim=8), batch)
    out, expected = run_both(rng, twin, batch, group=1)
    assert_close(out, expected, "float32")


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    storage=st.sampled_from(STORAGES),
    lens=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 3, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.integers(0, 8),
    with_sinks=st.booleans(),
)
def test_any_shape_matches_reference(
    seed: int,
    storage: tuple[str, str],
    lens: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    window: int,
    with_sinks: bool,
) -> None:
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, [q for q, _ in lens], [c for _, c in lens], block_size, num_blocks=104)
    twin = make_twin(
        rng,
        *storage,
        blocks=104,
        kv_heads=kv_heads,
        block_size=block_size,
        dim=2 * dims[0],
        value_dim=2 * dims[1],
        per_head=seed % 2 == 0,
    )
    twin = fill_context(rng, twin, batch)
    sinks = rng.standard_normal(kv_heads * group).astype(np.float32) if with_sinks else None
    out, expected = run_both(rng, twin, batch, group, window=window, sinks=sinks)
    assert_close(out, expected, storage[1])


@pytest.mark.parametrize("quant_type", ["none", "int8"])
def test_chunked_prefill_gives_what_one_prefill_gives(rng: np.random.Generator, quant_type: str) -> None:
    """However a prompt is cut into steps, the same bytes are stored and the same is attended."""
    tokens, block_size = 23, 4
    whole = make_batch(rng, [tokens], [0], block_size, num_blocks=8)
    q, k, v = (rng.standard_normal((tokens, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    outputs = []
    layers = []
    for cuts in ([0, tokens], [0, 5, 6, 16, tokens]):
        twin = make_twin(np.random.default_rng(3), quant_type)
        parts = []
        for begin, end in pairwise(cuts):
            step = ref.Batch(
                whole.block_tables,
                np.array([0, end - begin], np.int32),
                np.array([begin], np.int32),
                whole.slot_mapping[begin:end],
            )
            rows = (to_paddle(x[begin:end]) for x in (q, k, v))
            parts.append(append_attention(*rows, twin.layer, paddle_batch(step), softmax_scale=0.25).numpy())
        outputs.append(np.concatenate(parts))
        layers.append(twin.layer)
    # integer codes are attended as fractions above 1: float32 rounds at the level of the largest value, here 4
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6 if quant_type == "none" else 8e-6)
    np.testing.assert_array_equal(layers[0].key.numpy(), layers[1].key.numpy())


def test_slot_minus_one_is_attended_from_and_never_written(rng: np.random.Generator) -> None:
    """After a full prefix hit the last cached token runs again: its position is in the cache, its slot is -1."""
    batch = make_batch(rng, [1], [7], block_size=4, num_blocks=8)
    twin = fill_context(rng, make_twin(rng), ref.Batch(batch.block_tables, batch.query_start, np.array([8]), None))
    batch.slot_mapping[:] = -1
    before = twin.layer.key.numpy().copy()
    out, expected = run_both(rng, twin, batch, group=2)
    np.testing.assert_array_equal(before, twin.layer.key.numpy())
    assert np.isfinite(out.numpy()).all()
    assert_close(out, expected, "float32")


def test_padding_tokens_give_zeros(rng: np.random.Generator) -> None:
    batch = make_batch(rng, [2, 3], [1, 0], block_size=4, num_blocks=8)
    padded = ref.Batch(
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        np.concatenate([batch.slot_mapping, [-1, -1, -1]]).astype(np.int64),
    )
    twin = fill_context(rng, make_twin(rng), batch)
    out, expected = run_both(rng, twin, padded, group=2)
    np.testing.assert_array_equal(out.numpy()[5:], 0.0)
    assert_close(out, expected, "float32")


def test_row_whose_every_score_is_minus_infinity_gives_zeros(rng: np.random.Generator) -> None:
    twin = make_twin(rng, kv_heads=1, dim=8)
    batch = make_batch(rng, [3], [0], block_size=4, num_blocks=8)
    q = np.ones((3, 1, 8), np.float32)
    k = np.full((3, 1, 8), -np.inf, np.float32)
    out = append_attention(to_paddle(q), to_paddle(k), to_paddle(q), twin.layer, paddle_batch(batch), softmax_scale=1.0)
    np.testing.assert_array_equal(out.numpy(), 0.0)


def test_empty_step_returns_nothing_and_writes_nothing(rng: np.random.Generator) -> None:
    twin = make_twin(rng)
    batch = ref.Batch(
        np.full((0, 1), -1, np.int32), np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64)
    )
    out, _ = run_both(rng, twin, batch, group=2)
    assert list(out.shape) == [0, 4, 16]


@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
def test_recycled_block_with_nan_never_leaks(
    rng: np.random.Generator, isa: str, quant_type: str, model_dtype: str
) -> None:
    """Blocks come back with another request's bytes, NaN included: rows past a request's end must not be touched,
    not even multiplied by zero."""
    batch = make_batch(rng, [3, 1], [2, 4], block_size=8, num_blocks=8)
    outputs = []
    for poison in (True, False):
        own = np.random.default_rng(5)
        twin = make_twin(own, quant_type, model_dtype, block_size=8)
        if not poison:
            for cache in (twin.key, twin.value):
                cache.data[...] = 0
                if quant_type in ("block_wise_fp8", "int8_token"):
                    cache.scale[...] = 1
        out, _ = run_both(own, fill_context(own, twin, batch), batch, group=2)
        outputs.append(to_array(out))
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_later_token_with_nan_never_reaches_earlier_ones(rng: np.random.Generator) -> None:
    """Causality holds for NaN, too: inside one prefill, token 5's NaN reaches token 5 and later ones only."""
    twin = make_twin(rng)
    batch = make_batch(rng, [9], [0], block_size=4, num_blocks=8)
    q, k, v = (rng.standard_normal((9, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    k[5, 0], v[5, 1] = np.nan, np.nan
    rows = (to_paddle(x) for x in (q, k, v))
    out = append_attention(*rows, twin.layer, paddle_batch(batch), softmax_scale=0.25).numpy()
    assert np.isfinite(out[:5]).all()
    assert np.isnan(out[5:]).all()


def test_threads_do_not_change_the_result(rng: np.random.Generator) -> None:
    """Work is split over (request, kv head, tile): no result depends on who computed it."""
    openmp = ctypes.CDLL(str(next((Path(paddle.__file__).parent / "libs").glob("libiomp5*"))))
    batch = make_batch(rng, [200, 1, 1], [0, 300, 10], block_size=16, num_blocks=40)
    twin = fill_context(rng, make_twin(rng, blocks=40, block_size=16, dim=64, kv_heads=3), batch)
    before, outputs = openmp.omp_get_max_threads(), []
    try:
        for threads in (1, 2, 3):
            openmp.omp_set_num_threads(threads)
            out, expected = run_both(np.random.default_rng(1), twin, batch, group=3, softmax_scale=0.125)
            outputs.append(out.numpy())
    finally:
        openmp.omp_set_num_threads(before)
    assert_close(out, expected, "float32")
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])
