"""Twin caches for op tests: the same bytes as NumPy arrays for the reference and as Paddle tensors for the op."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle

from fastkv.core.dtype import STORAGE_DTYPES, ScaleKind, parse_quant_type
from fastkv.ops import AttentionBatch, LayerCache, Rope, StaticScales, append_attention
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import E4M3_NAN, from_float32, to_float32

MODEL_DTYPES = ("float32", "float16", "bfloat16")
QUANT_TYPES = tuple(row.name for row in STORAGE_DTYPES.values() if row.quant_type is not None)
STORAGES = [("none", dtype) for dtype in MODEL_DTYPES] + [(name, "float32") for name in QUANT_TYPES]
STORAGES += [("int4_zp", "bfloat16")]
"""Every storage once: (quantisation type, model dtype); int4_zp twice: bfloat16 has kernels of its own."""

# output rounding of each dtype plus float32 accumulation, relative to values of magnitude about 1
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def to_paddle(array: np.ndarray, model_dtype: str = "") -> paddle.Tensor:
    """A Paddle tensor with the array's bytes; uint16 stands for bfloat16 if that is the model dtype."""
    if array.dtype == np.uint16:
        assert model_dtype in ("", "bfloat16")
        return paddle.to_tensor(array.view(np.int16)).view("bfloat16")
    return paddle.to_tensor(array)


def to_array(tensor: paddle.Tensor) -> np.ndarray:
    """The tensor's bytes: bfloat16 as uint16."""
    return tensor.view("int16").numpy().view(np.uint16) if tensor.dtype == paddle.bfloat16 else tensor.numpy()


def model_rows(rng: np.random.Generator, shape: tuple[int, ...], model_dtype: str) -> np.ndarray:
    """Random rows in a model dtype (bfloat16: uint16 bits)."""
    return from_float32(rng.standard_normal(shape).astype(np.float32), model_dtype)


def poisoned(shape: tuple[int, ...], quant_type: str, model_dtype: str) -> np.ndarray:
    """A cache tensor whose every element is NaN (integer codes: the largest code)."""
    if quant_type == "none":
        return from_float32(np.full(shape, np.nan, np.float32), model_dtype)
    is_fp8 = STORAGE_DTYPES[parse_quant_type(quant_type)].bound == 448.0
    return np.full(shape, E4M3_NAN if is_fp8 else 0xFF, np.uint8)


def cache_tensor(
    rng: np.random.Generator,
    quant_type: str,
    model_dtype: str,
    shape: tuple[int, int, int, int],
    per_head: bool = False,
) -> ref.CacheTensor:
    """A poisoned reference cache of logical shape [blocks, kv_heads, block_size, dim], with fitting scales."""
    storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
    blocks, heads, block_size, dim = shape
    data = poisoned((blocks, heads, block_size, dim // storage.elements_per_byte), quant_type, model_dtype)
    if storage.scales is ScaleKind.NONE:
        return ref.CacheTensor(data, quant_type, model_dtype)
    if storage.scales is ScaleKind.DYNAMIC:
        return ref.CacheTensor(data, quant_type, model_dtype, np.full(shape[:3], np.nan, np.float32))
    count = heads if per_head else heads * dim
    scale = (rng.uniform(2.5, 4.0, count) / storage.bound).astype(np.float32)
    zero = rng.uniform(-2.0, 2.0, count).astype(np.float32) if storage.has_zero_point else None
    return ref.CacheTensor(data, quant_type, model_dtype, scale, zero)


@dataclass
class Twin:
    """One layer's cache twice: key and value for the reference, layer for the ops; the same bytes at the start."""

    key: ref.CacheTensor
    value: ref.CacheTensor
    layer: LayerCache

    def assert_same_bytes(self) -> None:
        """Everything that the op's cache holds equals the reference's, bit for bit."""
        pairs = [(self.key.data, self.layer.key), (self.value.data, self.layer.value)]
        if self.layer.key_scale is not None:
            pairs += [(self.key.scale, self.layer.key_scale), (self.value.scale, self.layer.value_scale)]
        for expected, tensor in pairs:
            np.testing.assert_array_equal(expected.view(np.uint8), to_array(tensor).view(np.uint8))


def layer_of(key: ref.CacheTensor, value: ref.CacheTensor | None) -> LayerCache:
    """The ops' view of copies of the reference's arrays."""
    storage = STORAGE_DTYPES[parse_quant_type(key.quant_type)]
    is_dynamic = storage.scales is ScaleKind.DYNAMIC
    static = None
    if storage.scales is ScaleKind.STATIC:
        static = StaticScales(
            key.scale, value.scale if value else None, key.zero_point, value.zero_point if value else None
        )
    return LayerCache(
        storage,
        to_paddle(key.data),
        to_paddle(value.data) if value else None,
        to_paddle(key.scale) if is_dynamic else None,
        to_paddle(value.scale) if is_dynamic and value else None,
        static,
    )


def make_twin(
    rng: np.random.Generator,
    quant_type: str = "none",
    model_dtype: str = "float32",
    *,
    blocks: int = 8,
    kv_heads: int = 2,
    block_size: int = 4,
    dim: int = 16,
    value_dim: int | None = None,
    per_head: bool = False,
) -> Twin:
    """Poisoned twins."""
    key = cache_tensor(rng, quant_type, model_dtype, (blocks, kv_heads, block_size, dim), per_head)
    value = cache_tensor(rng, quant_type, model_dtype, (blocks, kv_heads, block_size, value_dim or dim), per_head)
    return Twin(key, value, layer_of(key, value))


def make_batch(
    rng: np.random.Generator, query_lens: list[int], context_lens: list[int], block_size: int, num_blocks: int
) -> ref.Batch:
    """A ragged batch over distinct random blocks; every token gets its own position's slot."""
    needed = [-(-(q + c) // block_size) for q, c in zip(query_lens, context_lens, strict=True)]
    assert sum(needed) <= num_blocks, "the case needs more blocks"
    ids = rng.permutation(num_blocks)[: sum(needed)].astype(np.int32)
    tables = np.full((len(query_lens), max(needed, default=0) + 1), -1, np.int32)
    slots: list[int] = []
    start = 0
    for r, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        tables[r, : needed[r]] = ids[start : start + needed[r]]
        start += needed[r]
        positions = range(context, context + queries)
        slots += [int(tables[r, p // block_size]) * block_size + p % block_size for p in positions]
    query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return ref.Batch(tables, query_start, np.array(context_lens, np.int32), np.array(slots, np.int64))


def paddle_batch(batch: ref.Batch) -> AttentionBatch:
    """The same batch for the op."""
    return AttentionBatch.from_numpy(batch.block_tables, batch.query_start, batch.context_lens, batch.slot_mapping)


def context_slots(batch: ref.Batch, block_size: int) -> np.ndarray:
    """Slots of the tokens that are in the cache before the step."""
    slots = [
        int(table[p // block_size]) * block_size + p % block_size
        for table, length in zip(batch.block_tables, batch.context_lens, strict=True)
        for p in range(int(length))
    ]
    return np.array(slots, np.int64)


def fill_context(rng: np.random.Generator, twin: Twin, batch: ref.Batch) -> Twin:
    """Write random rows for the context; returns twins that hold them."""
    slots = context_slots(batch, twin.key.block_size)
    for cache in (twin.key, twin.value):
        shape = (len(slots), cache.data.shape[1], cache.dim)
        cache.write(slots, to_float32(model_rows(rng, shape, cache.model_dtype), cache.model_dtype))
    return Twin(twin.key, twin.value, layer_of(twin.key, twin.value))


def assert_close(actual: paddle.Tensor, expected: np.ndarray, model_dtype: str) -> None:
    """Compare an op's output with the reference's within the dtype's tolerance; NaN must match NaN."""
    tolerance = TOLERANCE[model_dtype]
    np.testing.assert_allclose(
        to_float32(to_array(actual), model_dtype),
        to_float32(expected, model_dtype),
        rtol=tolerance,
        atol=tolerance,
    )


def rope_tables(dim: int, style: str, positions: int = 64) -> ref.RopeTables:
    """Angles of the usual base; rotary_dim is dim."""
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    return ref.RopeTables(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), style)


def run_both(
    rng: np.random.Generator,
    twin: Twin,
    batch: ref.Batch,
    group: int,
    *,
    rope: ref.RopeTables | None = None,
    window: int = 0,
    sinks: np.ndarray | None = None,
    softmax_scale: float = 0.3,
) -> tuple[paddle.Tensor, np.ndarray]:
    """Random q, k, v through the op and through the reference; checks the caches' bytes.

    Returns:
        What the op gave, and what the reference says, which is finite: two NaN would compare equal.
    """
    dtype = twin.key.model_dtype
    tokens, heads = len(batch.slot_mapping), twin.key.data.shape[1]
    q = model_rows(rng, (tokens, heads * group, twin.key.dim), dtype)
    k = model_rows(rng, (tokens, heads, twin.key.dim), dtype)
    v = model_rows(rng, (tokens, heads, twin.value.dim), dtype)
    out = append_attention(
        to_paddle(q),
        to_paddle(k),
        to_paddle(v),
        twin.layer,
        paddle_batch(batch),
        softmax_scale=softmax_scale,
        rope=Rope(to_paddle(rope.cos), to_paddle(rope.sin), rope.style) if rope else None,
        window=window,
        sinks=to_paddle(sinks) if sinks is not None else None,
    )
    expected = ref.append_attention(
        q, k, v, twin.key, twin.value, batch, softmax_scale=softmax_scale, rope=rope, window=window, sinks=sinks
    )
    twin.assert_same_bytes()
    assert np.isfinite(to_float32(expected, dtype)).all(), "two NaN would compare equal"
    return out, expected
