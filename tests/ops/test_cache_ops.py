"""write_cache, gather_cache and copy_blocks against their references."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from helpers.ops_cases import MODEL_DTYPES, STORAGES, cache_tensor, layer_of, make_twin, model_rows, to_array, to_paddle
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.utils.dlpack import from_dlpack

from fastkv.ops import copy_blocks, gather_cache, write_cache
from fastkv.ops import reference as ref


@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
def test_write_then_gather_equals_reference(
    rng: np.random.Generator, isa: str, quant_type: str, model_dtype: str
) -> None:
    twin = make_twin(rng, quant_type, model_dtype, kv_heads=3, dim=20, value_dim=12)
    slots = rng.permutation(32)[:21].astype(np.int64)
    slots[[3, 20]] = -1
    k, v = (model_rows(rng, (21, 3, dim), model_dtype) for dim in (20, 12))
    write_cache(to_paddle(k), to_paddle(v), twin.layer, to_paddle(slots))
    ref.write_cache(k, v, twin.key, twin.value, slots)
    twin.assert_same_bytes()
    written = slots[slots >= 0]
    keys, values = gather_cache(twin.layer, to_paddle(written))
    assert keys.dtype == paddle.float32
    np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(twin.key, written))
    np.testing.assert_array_equal(values.numpy(), ref.gather_cache(twin.value, written))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    storage=st.sampled_from(STORAGES),
    blocks=st.integers(1, 5),
    block_size=st.integers(1, 9),
    kv_heads=st.integers(1, 4),
    dim=st.integers(1, 40),
    tokens=st.integers(0, 12),
)
def test_write_of_any_shape_equals_reference(
    seed: int,
    storage: tuple[str, str],
    blocks: int,
    block_size: int,
    kv_heads: int,
    dim: int,
    tokens: int,
) -> None:
    rng = np.random.default_rng(seed)
    twin = make_twin(rng, *storage, blocks=blocks, block_size=block_size, kv_heads=kv_heads, dim=2 * dim)
    slots = rng.permutation(blocks * block_size)[:tokens].astype(np.int64)
    k, v = (model_rows(rng, (len(slots), kv_heads, 2 * dim), storage[1]) for _ in range(2))
    write_cache(to_paddle(k), to_paddle(v), twin.layer, to_paddle(slots))
    ref.write_cache(k, v, twin.key, twin.value, slots)
    twin.assert_same_bytes()


def test_large_write_runs_in_parallel_and_equals_reference(rng: np.random.Generator) -> None:
    """Past the size where threads are used."""
    twin = make_twin(rng, "int8", blocks=40, block_size=16, kv_heads=4, dim=64)
    slots = rng.permutation(640).astype(np.int64)
    k, v = (model_rows(rng, (640, 4, 64), "float32") for _ in range(2))
    write_cache(to_paddle(k), to_paddle(v), twin.layer, to_paddle(slots))
    ref.write_cache(k, v, twin.key, twin.value, slots)
    twin.assert_same_bytes()
    keys, _ = gather_cache(twin.layer, to_paddle(slots))
    np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(twin.key, slots))


def test_gather_into_given_tensors_equals_reference(rng: np.random.Generator, isa: str) -> None:
    """Small and large enough for threads and streamed stores; runs of neighbours, repeats, rows that fill no line."""
    twin = make_twin(rng, "int8", blocks=40, block_size=16, kv_heads=3, dim=20, value_dim=12)
    written = np.arange(640)
    k, v = (model_rows(rng, (640, 3, dim), "float32") for dim in (20, 12))
    write_cache(to_paddle(k), to_paddle(v), twin.layer, to_paddle(written))
    ref.write_cache(k, v, twin.key, twin.value, written)
    for count in (0, 1, 7, 900):
        slots = rng.integers(0, 640, count)
        slots[: count // 2] = np.arange(count // 2)
        out = tuple(paddle.full([count, 3, dim], np.nan) for dim in (20, 12))
        keys, values = gather_cache(twin.layer, to_paddle(slots), out)
        assert keys is out[0]
        assert values is out[1]
        np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(twin.key, slots))
        np.testing.assert_array_equal(values.numpy(), ref.gather_cache(twin.value, slots))


@pytest.mark.parametrize("storage", STORAGES, ids="-".join)
@pytest.mark.parametrize("shift", [0, 1])
def test_large_gather_of_every_storage_to_any_address(
    rng: np.random.Generator, isa: str, storage: tuple[str, str], shift: int
) -> None:
    """Decoders store past the caches where the target starts with a line, which instructions for that insist on."""
    twin = make_twin(rng, *storage, blocks=20, block_size=16, kv_heads=3, dim=64, value_dim=32)
    written = rng.permutation(320)[:300]  # the others stay NaN, or the largest code
    k, v = (model_rows(rng, (300, 3, dim), storage[1]) for dim in (64, 32))
    write_cache(to_paddle(k), to_paddle(v), twin.layer, to_paddle(written))
    ref.write_cache(k, v, twin.key, twin.value, written)
    slots, out = np.roll(np.arange(320), 5), []
    for dim in (64, 32):
        memory = np.zeros(320 * 3 * dim + 32, np.float32)
        start = -memory.ctypes.data // 4 % 16 + shift
        out.append(from_dlpack(memory[start : start + 320 * 3 * dim].reshape(320, 3, dim)))
        assert out[-1].data_ptr() % 64 == 4 * shift
    for read, cache in zip(
        gather_cache(twin.layer, to_paddle(slots), (out[0], out[1])), (twin.key, twin.value), strict=True
    ):
        np.testing.assert_array_equal(read.numpy(), ref.gather_cache(cache, slots))


def test_write_goes_into_the_tensor_that_was_given(rng: np.random.Generator) -> None:
    """In place means this memory: a view of a larger allocation sees the write, its neighbours don't change."""
    whole = paddle.zeros([3, 4, 2, 4, 8])
    cache = ref.CacheTensor(np.zeros((4, 2, 4, 8), np.float32))
    layer = layer_of(cache, cache)
    object.__setattr__(layer, "op_inputs", (whole[1], whole[2], None, None, None, None))
    rows = rng.standard_normal((1, 2, 8)).astype(np.float32)
    address = whole[1].data_ptr()
    write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(np.array([5])))
    assert layer.op_inputs[0].data_ptr() == address
    np.testing.assert_array_equal(whole.numpy()[1, 1, :, 1], rows[0])
    assert np.count_nonzero(whole.numpy()) == np.count_nonzero(rows) * 2


@pytest.mark.parametrize("storage", [("none", dtype) for dtype in MODEL_DTYPES] + [("float8_e4m3fn", "float32")])
def test_many_latents_of_deepseek_shape_write_and_gather(
    rng: np.random.Generator, isa: str, storage: tuple[str, str]
) -> None:
    """Rows of 576: longer than what gather stages at a time, enough of them for threads."""
    cache = cache_tensor(rng, *storage, (6, 1, 16, 576), per_head=True)
    layer, rows = layer_of(cache, None), model_rows(rng, (70, 576), storage[1])
    slots = rng.permutation(96)[:70]
    write_cache(to_paddle(rows), None, layer, to_paddle(slots))
    ref.write_cache(rows[:, None], None, cache, None, slots)
    np.testing.assert_array_equal(to_array(layer.key), cache.data)
    for order in (slots, np.sort(slots)):
        np.testing.assert_array_equal(gather_cache(layer, to_paddle(order))[0].numpy(), ref.gather_cache(cache, order))


def test_latent_cache_writes_and_gathers(rng: np.random.Generator) -> None:
    for quant_type in ("none", "float8_e4m3fn"):
        cache = cache_tensor(rng, quant_type, "bfloat16", (4, 1, 4, 24), per_head=True)
        layer = layer_of(cache, None)
        rows = model_rows(rng, (3, 24), "bfloat16")
        slots = np.array([7, -1, 2])
        write_cache(to_paddle(rows), None, layer, to_paddle(slots))
        ref.write_cache(rows[:, None], None, cache, None, slots)
        np.testing.assert_array_equal(to_array(layer.key), cache.data)
        keys, values = gather_cache(layer, to_paddle(np.array([2, 7])))
        assert values is None
        np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(cache, np.array([2, 7])))


DTYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_moves_bytes_of_any_dtype(rng: np.random.Generator, isa: str, dtype: str) -> None:
    """Odd sizes, several tensors of different shape and block count, contents that are no numbers."""
    shapes = [(6, 3, 5), (9, 7), (6,)]
    tensors = []
    for shape in shapes:
        size = {"uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8}.get(
            dtype, 4
        )
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
        tensors.append(paddle.to_tensor(raw).view(dtype))
    before = [tensor.view("uint8").numpy().copy() for tensor in tensors]
    if len(shapes[-1]) == 1:
        before[-1] = before[-1].reshape(shapes[-1][0], -1)
    src, dst = np.array([0, 4, 0]), np.array([5, 1, 2])
    copy_blocks(tensors, to_paddle(src), to_paddle(dst))
    ref.copy_blocks(before, src, dst)
    for tensor, expected in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor.view("uint8").numpy().reshape(expected.shape), expected)


def test_copy_blocks_of_many_bytes_runs_in_parallel(rng: np.random.Generator, isa: str) -> None:
    arrays = [rng.integers(0, 256, (40, *shape), dtype=np.uint8) for shape in ((2, 16, 257), (3, 5), (2, 16, 64))]
    tensors = [to_paddle(array) for array in arrays]
    ids = rng.permutation(40)
    copy_blocks(tensors, to_paddle(ids[:20]), to_paddle(ids[20:]))
    ref.copy_blocks(arrays, ids[:20], ids[20:])
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_copy_of_nothing_changes_nothing() -> None:
    tensor = paddle.ones([2, 3])
    none = to_paddle(np.zeros(0, np.int64))
    copy_blocks([tensor], none, none)
    copy_blocks([], none, none)
    np.testing.assert_array_equal(tensor.numpy(), 1.0)
