"""The shapes that the fast kernels tell apart, against the NumPy reference.

Row lengths that fill their groups or do not, few rows and many, work that is cut into pieces, and numbers that folding
scales into queries could spoil.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ops_cases import (
    QUANT_TYPES,
    STORAGES,
    assert_close,
    context_slots,
    fill_context,
    layer_of,
    make_batch,
    make_twin,
    model_rows,
    paddle_batch,
    run_both,
    to_array,
    to_paddle,
)

from fastkv.ops import append_attention, mla_append_attention
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import to_float32

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fn_zp", "block_wise_fp8")


def check(
    rng: np.random.Generator,
    storage: tuple[str, str],
    queries: list[int],
    contexts: list[int],
    *,
    group: int,
    dim: int,
    value_dim: int | None = None,
    block_size: int = 16,
    kv_heads: int = 1,
    window: int = 0,
    with_sinks: bool = False,
) -> None:
    """Random contents of one shape through op and reference."""
    blocks = sum(-(-(q + c) // block_size) for q, c in zip(queries, contexts, strict=True)) + 1
    batch = make_batch(rng, queries, contexts, block_size, blocks)
    twin = make_twin(
        rng, *storage, blocks=blocks, kv_heads=kv_heads, block_size=block_size, dim=dim, value_dim=value_dim
    )
    twin = fill_context(rng, twin, batch)
    sinks = rng.standard_normal(kv_heads * group).astype(np.float32) if with_sinks else None
    out, expected = run_both(rng, twin, batch, group, window=window, sinks=sinks, softmax_scale=dim**-0.5)
    assert_close(out, expected, storage[1])


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_decode_of_every_storage_and_row_length(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], dim: int, value_dim: int
) -> None:
    """Rows of whole groups of 64, 32 or 16 channels have kernels of their own."""
    check(rng, storage, [1, 2], [37, 5], group=3, dim=dim, value_dim=value_dim)


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
def test_decode_of_every_group(rng: np.random.Generator, storage: tuple[str, str], group: int) -> None:
    """One to four rows share a kernel call, up to sixteen a walk over the cache."""
    check(rng, storage, [1], [70], group=group, dim=64, with_sinks=True)


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize("queries", [2, 4, 16, 17, 33])
def test_verification_and_chunks_of_every_storage(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], queries: int
) -> None:
    """Around sixteen query rows, where panels take over from rows, with a window that ends inside both."""
    check(rng, storage, [queries], [61], group=2, dim=64)
    check(rng, storage, [queries], [61], group=1, dim=64, window=20)
    check(rng, storage, [queries], [260], group=1, dim=64, window=150)  # longer than a chunk


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("context", [127, 128, 129, 767, 768, 1023, 1025])
def test_contexts_around_chunks_blocks_and_pieces(rng: np.random.Generator, block_size: int, context: int) -> None:
    for storage in (("none", "float32"), ("int4_zp", "float32")):
        check(rng, storage, [1], [context], group=4, dim=64, block_size=block_size)


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
def test_long_context_is_cut_into_pieces(rng: np.random.Generator, isa: str, storage: tuple[str, str]) -> None:
    """A request long enough for several pieces beside short ones, window and sinks included."""
    check(rng, storage, [1, 1, 3], [9000, 3, 2500], group=2, dim=16, block_size=64, with_sinks=True)
    check(rng, storage, [1, 20], [9000, 4200], group=2, dim=16, block_size=64, window=3000)


@pytest.mark.parametrize("storage", [("none", "float32"), ("int8", "float32"), ("int4_zp", "float32")], ids="-".join)
def test_context_of_128k(rng: np.random.Generator, isa: str, storage: tuple[str, str]) -> None:
    check(rng, storage, [1], [131071], group=1, dim=16, block_size=128)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e6, 1e12])
def test_scales_far_from_one_keep_their_precision(
    rng: np.random.Generator, isa: str, quant_type: str, scale: float
) -> None:
    """Scales are folded into queries and results: products must stay in float32's range, whatever the scale."""
    batch = make_batch(rng, [1], [40], 16, 4)
    twin = make_twin(rng, quant_type, blocks=4, kv_heads=1, block_size=16, dim=64)
    for cache in (twin.key, twin.value):
        if quant_type not in ("block_wise_fp8", "int8_token"):
            cache.scale[...] *= np.float32(scale)
    k, v = (rng.standard_normal((41, 1, 64)).astype(np.float32) * np.float32(scale) for _ in range(2))
    slots = np.array([int(batch.block_tables[0, p // 16]) * 16 + p % 16 for p in range(40)])
    twin.key.write(slots, k[:40])
    twin.value.write(slots, v[:40])
    layer = layer_of(twin.key, twin.value)
    q = rng.standard_normal((1, 2, 64)).astype(np.float32)
    softmax_scale = 0.125 / scale
    out = append_attention(
        to_paddle(q), to_paddle(k[40:]), to_paddle(v[40:]), layer, paddle_batch(batch), softmax_scale=softmax_scale
    )
    expected = ref.append_attention(
        q, k[40:], v[40:], twin.key, twin.value, batch, softmax_scale=float(np.float32(softmax_scale))
    )
    np.testing.assert_allclose(to_array(out) / scale, expected / scale, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scales_of_keys_far_from_the_queries_are_seen_in_the_scores(
    rng: np.random.Generator, isa: str, quant_type: str, scale: float
) -> None:
    """Ordinary queries: scores say that one position counts, or that all count alike. It is the folded query, not the
    query, that has to stay in float32's range."""
    batch = make_batch(rng, [1], [40], 16, 4)
    twin = make_twin(rng, quant_type, blocks=4, kv_heads=1, block_size=16, dim=64)
    if quant_type not in ("block_wise_fp8", "int8_token"):
        twin.key.scale[...] *= np.float32(scale)
    k, v = (rng.standard_normal((41, 1, 64)).astype(np.float32) for _ in range(2))
    k *= np.float32(scale)
    twin.key.write(context_slots(batch, 16), k[:40])
    twin.value.write(context_slots(batch, 16), v[:40])
    q = rng.standard_normal((1, 2, 64)).astype(np.float32)
    layer = layer_of(twin.key, twin.value)
    out = append_attention(*map(to_paddle, (q, k[40:], v[40:])), layer, paddle_batch(batch), softmax_scale=0.125)
    expected = ref.append_attention(q, k[40:], v[40:], twin.key, twin.value, batch, softmax_scale=0.125)
    assert_close(out, expected, "float32")


@pytest.mark.parametrize("quant_type", ["none", *FLOAT8])
@pytest.mark.parametrize("queries", [1, 40])
def test_nan_in_one_value_reaches_its_channel_only(
    rng: np.random.Generator, isa: str, quant_type: str, queries: int
) -> None:
    """A NaN that is stored and attended comes out, in its channel of its head, and nowhere else; float8's codes for it
    are watched for, not computed with."""
    batch = make_batch(rng, [queries], [0], 16, 4)
    twin = make_twin(rng, quant_type, blocks=4, kv_heads=2, block_size=16, dim=64)
    q, k, v = (rng.standard_normal((queries, heads, 64)).astype(np.float32) for heads in (4, 2, 2))
    v[queries // 2, 1, 37] = np.nan
    out = append_attention(*map(to_paddle, (q, k, v)), twin.layer, paddle_batch(batch), softmax_scale=0.125)
    is_nan = np.isnan(to_array(out))
    assert is_nan[queries // 2 :, 2:, 37].all()
    assert is_nan.sum() == (queries - queries // 2) * 2


@pytest.mark.parametrize("quant_type", ["none", *FLOAT8])
def test_nan_in_a_key_spoils_its_head(rng: np.random.Generator, isa: str, quant_type: str) -> None:
    batch = make_batch(rng, [20], [0], 16, 4)
    twin = make_twin(rng, quant_type, blocks=4, kv_heads=2, block_size=16, dim=64)
    q, k, v = (rng.standard_normal((20, heads, 64)).astype(np.float32) for heads in (4, 2, 2))
    k[11, 0, 5] = np.nan
    out = append_attention(*map(to_paddle, (q, k, v)), twin.layer, paddle_batch(batch), softmax_scale=0.125)
    is_nan = np.isnan(to_array(out))
    assert is_nan[11:, :2].all()
    assert not is_nan[:11].any()
    assert not is_nan[:, 2:].any()


@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
def test_infinite_query_gives_nan_as_the_reference_says(
    rng: np.random.Generator, isa: str, quant_type: str, model_dtype: str
) -> None:
    """An infinite score leaves no finite soft-max; other heads are untouched."""
    batch = make_batch(rng, [1], [20], 16, 4)
    twin = fill_context(
        rng, make_twin(rng, quant_type, model_dtype, blocks=4, kv_heads=1, block_size=16, dim=64), batch
    )
    q = rng.standard_normal((1, 2, 64)).astype(np.float32)
    q[0, 0, 3] = np.inf
    q = q.astype(np.float16) if model_dtype == "float16" else q
    if model_dtype == "bfloat16":
        q = (q.view(np.uint32) >> 16).astype(np.uint16)
    k = model_rows(rng, (1, 1, 64), model_dtype)
    out = append_attention(*map(to_paddle, (q, k, k)), twin.layer, paddle_batch(batch), softmax_scale=0.125)
    values = to_float32(to_array(out), model_dtype)
    assert np.isnan(values[0, 0]).all()
    assert np.isfinite(values[0, 1]).all()


def test_infinite_value_behind_the_own_position_never_leaks(rng: np.random.Generator, isa: str) -> None:
    """Panels hold rows that attend different positions; a weight of zero times infinity would be NaN."""
    batch = make_batch(rng, [60], [0], 16, 8)
    twin = make_twin(rng, blocks=8, kv_heads=1, block_size=16, dim=32)
    q, k, v = (rng.standard_normal((60, heads, 32)).astype(np.float32) for heads in (2, 1, 1))
    v[33, 0, 7] = np.inf
    out = to_array(
        append_attention(*map(to_paddle, (q, k, v)), twin.layer, paddle_batch(batch), softmax_scale=0.2, window=9)
    )
    assert np.isinf(out[33:42, :, 7]).all()
    out[33:42, :, 7] = 0.0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("context", [70, 3000])
def test_mla_decode_of_deepseek_shape(rng: np.random.Generator, isa: str, context: int) -> None:
    """16 heads over 512 + 64: one kv head, so a long request is cut into pieces."""
    batch = make_batch(rng, [1, 1], [context, 2], 64, 60)
    cache = make_twin(rng, blocks=60, kv_heads=1, block_size=64, dim=576).key
    slots = [int(batch.block_tables[r, p // 64]) * 64 + p % 64 for r, n in ((0, context), (1, 2)) for p in range(n)]
    cache.write(np.array(slots), rng.standard_normal((context + 2, 1, 576)).astype(np.float32))
    q = rng.standard_normal((2, 16, 576)).astype(np.float32)
    latent = rng.standard_normal((2, 576)).astype(np.float32)
    out = mla_append_attention(
        to_paddle(q),
        to_paddle(latent),
        layer_of(cache, None),
        paddle_batch(batch),
        kv_lora_rank=512,
        softmax_scale=0.04,
    )
    expected = ref.mla_append_attention(q, latent, cache, batch, kv_lora_rank=512, softmax_scale=0.04)
    assert_close(out, expected, "float32")
