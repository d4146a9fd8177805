"""Numbers that are none, and numbers at the ends of float32: they must stay where they are.

What a request may not read (rows before its window, after its position) may hold anything; what it reads and is no
number must come out as none, in its own head and channel. Whichever kernel works: few rows, many rows, one to four rows
a call.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.ops_cases import (
    MODEL_DTYPES,
    STORAGES,
    Twin,
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

from fastkv.core.dtype import STORAGE_DTYPES, ScaleKind, parse_quant_type
from fastkv.ops import append_attention
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import from_float32, to_float32

WITH_NAN = [(name, dtype) for name, dtype in STORAGES if name == "none" or "fp8" in name or "float8" in name]
"""Storages that can hold a NaN."""


@pytest.mark.parametrize("storage", WITH_NAN, ids="-".join)
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_nan_in_the_cache_reaches_its_own_head_in_decode(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], group: int
) -> None:
    """A key of head 0 spoils head 0; a value of head 1 spoils its channel there. In whichever chunk they are."""
    batch = make_batch(rng, [1], [150], 16, 11)
    for position in (0, 77, 149):
        twin = fill_context(rng, make_twin(rng, *storage, blocks=11, kv_heads=2, block_size=16, dim=64), batch)
        slot = context_slots(batch, 16)[[position]]
        key, value = twin.key.read(slot), twin.value.read(slot)
        key[0, 0, 5], value[0, 1, 37] = np.nan, np.nan
        twin.key.write(slot, key)
        twin.value.write(slot, value)
        layer = layer_of(twin.key, twin.value)
        rows = (to_paddle(model_rows(rng, (1, heads, 64), storage[1])) for heads in (2 * group, 2, 2))
        out = append_attention(*rows, layer, paddle_batch(batch), softmax_scale=0.125)
        is_nan = np.isnan(to_float32(to_array(out), storage[1]))[0]
        assert is_nan[:group].all()
        assert is_nan[group:, 37].all()
        assert is_nan.sum() == group * 64 + group


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize(("queries", "window"), [(1, 20), (4, 20), (8, 1), (40, 30)])
def test_nan_before_the_window_is_never_read(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], queries: int, window: int
) -> None:
    """A window starts inside a block whose earlier rows are not its own: they hold NaN, or a scale that is one."""
    batch = make_batch(rng, [queries], [100], 16, 10)
    twin = fill_context(rng, make_twin(rng, *storage, blocks=10, kv_heads=1, block_size=16, dim=64), batch)
    before = context_slots(batch, 16)[: 101 - window]
    for cache in (twin.key, twin.value):
        cache.write(before, np.full((len(before), 1, 64), np.nan, np.float32))
        if STORAGE_DTYPES[parse_quant_type(storage[0])].scales is ScaleKind.DYNAMIC:
            assert cache.scale is not None
            cache.scale[before // 16, 0, before % 16] = np.nan
    twin = Twin(twin.key, twin.value, layer_of(twin.key, twin.value))
    out, expected = run_both(rng, twin, batch, group=2, window=window, softmax_scale=0.125)
    assert_close(out, expected, storage[1])


@pytest.mark.parametrize("dim", [20, 32])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("position", "window"), [(33, 0), (57, 5), (63, 0), (64, 9), (99, 3)])
def test_infinite_values_of_one_token_reach_its_readers_only(
    rng: np.random.Generator, isa: str, dim: int, group: int, position: int, window: int
) -> None:
    """Panels hold rows that attend different positions, and leave in their scratch what later chunks must not meet:
    a weight or a query of zero times infinity would be NaN."""
    batch = make_batch(rng, [100], [0], 16, 8)
    twin = make_twin(rng, blocks=8, kv_heads=1, block_size=16, dim=dim)
    q, k, v = (rng.standard_normal((100, heads, dim)).astype(np.float32) for heads in (group, 1, 1))
    v[position] = np.inf
    out = append_attention(
        *map(to_paddle, (q, k, v)), twin.layer, paddle_batch(batch), softmax_scale=0.2, window=window
    )
    is_reader = np.zeros(100, bool)
    is_reader[position : position + window if window else 100] = True
    values = to_array(out)
    assert np.isinf(values[is_reader]).all()
    assert np.isfinite(values[~is_reader]).all()


def test_infinite_value_that_some_windows_have_passed_reaches_the_others(rng: np.random.Generator, isa: str) -> None:
    """A chunk that lies before every row's own position, and in which the windows of some rows start."""
    batch = make_batch(rng, [40], [200], 16, 16)
    twin = fill_context(rng, make_twin(rng, blocks=16, kv_heads=1, block_size=16, dim=32), batch)
    slot = context_slots(batch, 16)[[60]]
    twin.value.write(slot, np.full((1, 1, 32), np.inf, np.float32))
    rows = (rng.standard_normal((40, heads, 32)).astype(np.float32) for heads in (1, 1, 1))
    out = append_attention(
        *map(to_paddle, rows),
        layer_of(twin.key, twin.value),
        paddle_batch(batch),
        softmax_scale=0.2,
        window=150,
    )
    values = to_array(out)  # position 200 + t sees 51 + t and later
    assert np.isinf(values[:10]).all()
    assert np.isfinite(values[10:]).all()


@pytest.mark.parametrize("quant_type", ["block_wise_fp8", "int8_token"])
@pytest.mark.parametrize("group", [1, 3])
def test_nan_scales_of_one_request_are_not_met_by_the_next(
    rng: np.random.Generator, isa: str, quant_type: str, group: int
) -> None:
    """Kernels take whole vectors of scales, past a chunk's end too, where those of the request before may lie."""
    batch = make_batch(rng, [1, 1], [120, 2], 16, 9)
    twin = fill_context(rng, make_twin(rng, quant_type, blocks=9, kv_heads=1, block_size=16, dim=64), batch)
    rows = [model_rows(rng, (2, heads, 64), "float32") for heads in (group, 1, 1)]
    expected = ref.append_attention(*rows, twin.key, twin.value, batch, softmax_scale=0.125)
    spoiled = context_slots(batch, 16)[:120]
    for cache in (twin.key, twin.value):
        assert cache.scale is not None
        cache.scale[spoiled // 16, 0, spoiled % 16] = np.nan
    layer = layer_of(twin.key, twin.value)
    out = append_attention(*map(to_paddle, rows), layer, paddle_batch(batch), softmax_scale=0.125)
    assert np.isnan(to_array(out)[0]).all()
    assert_close(out[1], expected[1], "float32")


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
def test_infinite_query_against_keys_of_the_other_sign_attends_nothing(
    rng: np.random.Generator, isa: str, storage: tuple[str, str]
) -> None:
    """Every score is minus infinity, which scales and zero points that are folded into a query must not spoil."""
    batch = make_batch(rng, [1], [20], 16, 2)
    twin = make_twin(rng, *storage, blocks=2, kv_heads=1, block_size=16, dim=64)
    keys = rng.standard_normal((21, 1, 64)).astype(np.float32)
    keys[..., 3] = -1.0
    slots = context_slots(batch, 16)
    twin.key.write(slots, keys[:20])
    twin.value.write(slots, keys[:20])
    q = rng.standard_normal((1, 2, 64)).astype(np.float32)
    q[0, 0, 3] = np.inf
    rows = (to_paddle(from_float32(x, storage[1])) for x in (q, keys[20:], keys[20:]))
    out = append_attention(*rows, layer_of(twin.key, twin.value), paddle_batch(batch), softmax_scale=0.125)
    values = to_float32(to_array(out), storage[1])
    np.testing.assert_array_equal(values[0, 0], 0.0)
    assert np.isfinite(values[0, 1]).all()
    assert np.any(values[0, 1] != 0.0)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("sink", [None, -np.inf, 0.5])
def test_keys_of_minus_infinity_weigh_nothing(
    rng: np.random.Generator, isa: str, dtype: str, queries: int, sink: float | None
) -> None:
    """Whole chunks and pieces without a largest score to subtract; a request that has nothing else; empty sinks."""
    batch = make_batch(rng, [queries, queries], [2000, 40], 64, 34)
    twin = fill_context(rng, make_twin(rng, "none", dtype, blocks=34, kv_heads=1, block_size=64, dim=16), batch)
    gone = np.r_[0:700, 1200:1990, 2000:2040]
    nothing = np.full((len(gone), 1, 16), -np.inf, np.float32)
    twin.key.write(context_slots(batch, 64)[gone], nothing)
    q = from_float32(rng.uniform(0.5, 2, (2 * queries, 2, 16)).astype(np.float32), dtype)
    k, v = (model_rows(rng, (2 * queries, 1, 16), dtype) for _ in range(2))
    k[queries:] = from_float32(nothing[:1], dtype)
    sinks = None if sink is None else np.full(2, sink, np.float32)
    out = append_attention(
        *map(to_paddle, (q, k, v)),
        layer_of(twin.key, twin.value),
        paddle_batch(batch),
        softmax_scale=0.25,
        sinks=None if sinks is None else to_paddle(sinks),
    )
    expected = ref.append_attention(q, k, v, twin.key, twin.value, batch, softmax_scale=0.25, sinks=sinks)
    assert_close(out, expected, dtype)
    np.testing.assert_array_equal(to_float32(to_array(out), dtype)[queries:], 0.0)


@pytest.mark.parametrize("storage", [x for x in STORAGES if x[1] != "float16"], ids="-".join)
@pytest.mark.parametrize("queries", [1, 40])
def test_queries_near_the_end_of_float32_choose_one_position(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], queries: int
) -> None:
    """Queries that float32 holds with the scales in them, but not with what kernels multiply them by besides.
    (float16 ends at 65504.)"""
    batch = make_batch(rng, [queries], [90], 16, 9)
    twin = fill_context(rng, make_twin(rng, *storage, blocks=9, kv_heads=1, block_size=16, dim=64), batch)
    q = from_float32((rng.standard_normal((queries, 3, 64)) * 1e33).astype(np.float32), storage[1])
    k, v = (model_rows(rng, (queries, 1, 64), storage[1]) for _ in range(2))
    layer = layer_of(twin.key, twin.value)
    out = append_attention(*map(to_paddle, (q, k, v)), layer, paddle_batch(batch), softmax_scale=0.125)
    expected = ref.append_attention(q, k, v, twin.key, twin.value, batch, softmax_scale=0.125)
    assert_close(out, expected, storage[1])


@pytest.mark.parametrize("queries", [1, 40])
def test_nan_of_any_bits_stays_one_in_bfloat16(rng: np.random.Generator, isa: str, queries: int) -> None:
    """Rounding up the NaN whose bits are all ones would carry into the sign and give -0."""
    batch = make_batch(rng, [queries], [20], 16, 4)
    twin = make_twin(rng, "block_wise_fp8", "bfloat16", blocks=4, kv_heads=1, block_size=16, dim=64)
    twin = fill_context(rng, twin, batch)
    slot = context_slots(batch, 16)[7]
    assert twin.value.scale is not None
    twin.value.scale[slot // 16, 0, slot % 16] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    rows = (to_paddle(model_rows(rng, (queries, heads, 64), "bfloat16")) for heads in (2, 1, 1))
    out = append_attention(*rows, layer_of(twin.key, twin.value), paddle_batch(batch), softmax_scale=0.125)
    assert np.isnan(to_float32(to_array(out), "bfloat16")).all()


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e-30])
def test_queries_near_zero_attend_all_positions_alike(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], size: float
) -> None:
    """What kernels multiply a query by, against tiny lanes, has an end: not every query can be brought to a middle."""
    batch = make_batch(rng, [1], [40], 16, 4)
    twin = fill_context(rng, make_twin(rng, *storage, blocks=4, kv_heads=1, block_size=16, dim=64), batch)
    q = from_float32((rng.standard_normal((1, 3, 64)) * size).astype(np.float32), storage[1])
    k, v = (model_rows(rng, (1, 1, 64), storage[1]) for _ in range(2))
    layer = layer_of(twin.key, twin.value)
    out = append_attention(*map(to_paddle, (q, k, v)), layer, paddle_batch(batch), softmax_scale=0.125)
    expected = ref.append_attention(q, k, v, twin.key, twin.value, batch, softmax_scale=0.125)
    assert_close(out, expected, storage[1])
    np.testing.assert_allclose(
        to_float32(to_array(out), storage[1])[0, 0], twin.value.read(context_slots(batch, 16)).mean(0)[0], atol=0.2
    )


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize("queries", [4, 40])
def test_enormous_score_behind_the_own_position_is_not_met(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], queries: int
) -> None:
    """Kernels multiply later tokens' keys too; as the largest score one would leave an earlier token no weight."""
    batch = make_batch(rng, [queries], [30], 16, 5)
    twin = fill_context(rng, make_twin(rng, *storage, blocks=5, kv_heads=1, block_size=16, dim=64), batch)
    q, k, v = (rng.standard_normal((queries, heads, 64)).astype(np.float32) for heads in (2, 1, 1))
    q, k[-1] = np.abs(q) + 8, 3.0  # a score of some 200
    q, k, v = (from_float32(x, storage[1]) for x in (q, k, v))
    layer = layer_of(twin.key, twin.value)
    out = append_attention(*map(to_paddle, (q, k, v)), layer, paddle_batch(batch), softmax_scale=0.125)
    expected = ref.append_attention(q, k, v, twin.key, twin.value, batch, softmax_scale=0.125)
    assert_close(out, expected, storage[1])


@pytest.mark.parametrize("position", [5, 700, 1999])
def test_enormous_score_in_one_piece_outweighs_the_others(rng: np.random.Generator, isa: str, position: int) -> None:
    """Pieces of a long context are merged beside the largest score of all, wherever it is: e^200 is infinite."""
    batch = make_batch(rng, [1], [2000], 64, 32)
    twin = fill_context(rng, make_twin(rng, blocks=32, kv_heads=1, block_size=64, dim=16), batch)
    twin.key.write(context_slots(batch, 64)[[position]], np.full((1, 1, 16), 3.0, np.float32))
    q = np.full((1, 2, 16), 20.0, np.float32)
    k, v = (rng.standard_normal((1, 1, 16)).astype(np.float32) for _ in range(2))
    layer = layer_of(twin.key, twin.value)
    out = append_attention(*map(to_paddle, (q, k, v)), layer, paddle_batch(batch), softmax_scale=0.25)
    expected = ref.append_attention(q, k, v, twin.key, twin.value, batch, softmax_scale=0.25)
    assert_close(out, expected, "float32")


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    """This thread's SSE unit takes subnormal numbers for zero, as libraries built with -ffast-math make it do."""
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        pytest.skip("glibc on x86-64 keeps the SSE control word at the end of fenv_t")
    libm = ctypes.CDLL("libm.so.6")
    before, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(before)
    changed[:] = before[:]
    changed[7] |= 0x8040
    libm.fesetenv(changed)
    yield
    libm.fesetenv(before)


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.usefixtures("flushed_subnormals")
def test_thread_that_flushes_subnormals_attends_the_same(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], queries: int
) -> None:
    """Codes become subnormal floats in registers, and float8 and float16 have subnormal values of their own."""
    batch = make_batch(rng, [queries], [90], 16, 9)
    twin = make_twin(rng, *storage, blocks=9, kv_heads=2, block_size=16, dim=64)
    out, expected = run_both(rng, fill_context(rng, twin, batch), batch, group=2, softmax_scale=0.125)
    assert_close(out, expected, storage[1])
