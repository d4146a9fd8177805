"""What every op means, in NumPy, written to be read.

Called by tests, and by whoever wants to know exactly what an op does; imports without paddle. Works in place on NumPy
arrays of the caches' layouts. Bytes that an op writes are the same, bit for bit; attention is computed in float64 here,
so the ops' float32 results differ by rounding.

Layouts: key and value [blocks, kv_heads, block_size, dim]; a slot is block * block_size + offset. Rows are in the
model's dtype, bfloat16 as uint16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastkv.core.dtype import ScaleKind
from fastkv.errors import ConfigError
from fastkv.ops.reference_codec import (
    Array,
    Float32,
    RowScales,
    decode,
    dynamic_scale,
    encode,
    from_float32,
    storage_of,
    to_float32,
)


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One cache tensor as arrays.

    Attributes:
        data: [blocks, kv_heads, block_size, stored_dim]: uint8, or the model's dtype when quant_type is "none".
        quant_type: name of the quantisation type.
        model_dtype: "float32", "float16" or "bfloat16": of the rows that are written, and of data if not quantised.
        scale: static: float32 [kv_heads * dim] or [kv_heads]; dynamic: float32 [blocks, kv_heads, block_size].
        zero_point: float32, shape of scale.
    """

    data: Array
    quant_type: str = "none"
    model_dtype: str = "float32"
    scale: Float32 | None = None
    zero_point: Float32 | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.data.shape[2])

    @property
    def dim(self) -> int:
        """Logical elements of a row."""
        return int(self.data.shape[3]) * storage_of(self.quant_type).elements_per_byte

    def row_scales(self, blocks: Array, offsets: Array) -> RowScales:
        """Scales of the rows of all heads at n places, broadcastable to [n, kv_heads, dim]."""
        heads = self.data.shape[1]
        if storage_of(self.quant_type).scales is ScaleKind.DYNAMIC:
            assert self.scale is not None
            return RowScales(self.scale[blocks, :, offsets, None])
        return RowScales(*(None if x is None else x.reshape(heads, -1) for x in (self.scale, self.zero_point)))

    def write(self, slots: Array, rows: Float32) -> None:
        """Store rows [n, kv_heads, dim] at the slots; -1 is not written."""
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        blocks, offsets = np.divmod(slots, self.block_size)
        if self.quant_type == "none":
            self.data[blocks, :, offsets] = from_float32(rows, self.model_dtype)
            return
        if storage_of(self.quant_type).scales is ScaleKind.DYNAMIC:
            assert self.scale is not None
            self.scale[blocks, :, offsets] = dynamic_scale(self.quant_type, rows)
        self.data[blocks, :, offsets] = encode(self.quant_type, rows, self.row_scales(blocks, offsets))

    def read(self, slots: Array) -> Float32:
        """The rows at the slots, dequantised: float32 [n, kv_heads, dim]."""
        blocks, offsets = np.divmod(slots, self.block_size)
        stored = self.data[blocks, :, offsets]
        if self.quant_type == "none":
            return to_float32(stored, self.model_dtype)
        return decode(self.quant_type, stored, self.row_scales(blocks, offsets))


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch, as AttentionBatch describes it."""

    block_tables: Array
    query_start: Array
    context_lens: Array
    slot_mapping: Array


@dataclass(frozen=True, slots=True)
class RopeTables:
    """cos and sin: float32 [max_position, rotary_dim / 2]; style "neox" or "interleaved"."""

    cos: Float32
    sin: Float32
    style: str = "neox"


def rotate(rows: Float32, position: int, rope: RopeTables | None) -> Float32:
    """Rotary embedding of rows [heads, dim] at one position; the dims past rotary_dim stay as they are."""
    if rope is None:
        return rows
    cos, sin = rope.cos[position], rope.sin[position]
    half = cos.shape[0]
    first, second = (slice(0, half), slice(half, 2 * half))
    if rope.style == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = rows[:, first], rows[:, second]
    out = rows.copy()
    out[:, first], out[:, second] = a * cos - b * sin, b * cos + a * sin
    return out


def write_cache(k: Array, v: Array | None, key: CacheTensor, value: CacheTensor | None, slot_mapping: Array) -> None:
    """Write rows [num_tokens, kv_heads, dim] to the slots; -1 is not written. v and value are None for latents."""
    key.write(slot_mapping, to_float32(k, key.model_dtype))
    if v is not None and value is not None:
        value.write(slot_mapping, to_float32(v, value.model_dtype))


def gather_cache(cache: CacheTensor, slots: Array) -> Float32:
    """Rows at the slots, dequantised: float32 [n, kv_heads, dim]."""
    return cache.read(slots)


def attend(scores: Array, values: Array, sink: float | None) -> Array:
    """Soft-max of scores [n], weighted sum of values [n, dim]; zeros if nothing has any weight.

    A sink is one more score in the denominator, with no value.
    """
    joined = scores if sink is None else np.append(scores, sink)
    if joined.size == 0 or np.all(joined == -np.inf):
        return np.zeros(values.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(joined - joined.max())
        return (weights[: len(scores)] / weights.sum()) @ values


def append_attention(
    q: Array,
    k: Array,
    v: Array | None,
    key: CacheTensor,
    value: CacheTensor | None,
    batch: Batch,
    *,
    softmax_scale: float,
    rope: RopeTables | None = None,
    window: int = 0,
    sinks: Float32 | None = None,
    value_dim: int | None = None,
) -> Array:
    """Write k and v, then attend each query over the cache's positions 0 to its own (the last `window` of them).

    value None means MLA: a value is the first value_dim elements of its key row.

    Returns:
        [num_tokens, num_heads, value_dim] in the model's dtype.
    """
    queries, keys = to_float32(q, key.model_dtype), to_float32(k, key.model_dtype)
    num_tokens, num_heads = queries.shape[:2]
    group = num_heads // key.data.shape[1]
    out_dim = value.dim if value is not None else int(value_dim or key.dim)
    out = np.zeros((num_tokens, num_heads, out_dim), np.float32)

    owned = [(r, t) for r in range(len(batch.context_lens)) for t in range(*batch.query_start[r : r + 2])]
    places = [(r, t, int(batch.context_lens[r] + t - batch.query_start[r])) for r, t in owned]
    for _, token, position in places:
        queries[token] = rotate(queries[token], position, rope)
        keys[token] = rotate(keys[token], position, rope)
    key.write(batch.slot_mapping, keys)
    if value is not None and v is not None:
        value.write(batch.slot_mapping, to_float32(v, value.model_dtype))

    for request, token, position in places:
        positions = np.arange(max(0, position + 1 - window) if window else 0, position + 1)
        blocks = batch.block_tables[request, positions // key.block_size].astype(np.int64)
        slots = blocks * key.block_size + positions % key.block_size
        stored_keys = key.read(slots).astype(np.float64)
        stored_values = stored_keys[..., :out_dim] if value is None else value.read(slots).astype(np.float64)
        for head in range(num_heads):
            with np.errstate(invalid="ignore", over="ignore"):
                scores = stored_keys[:, head // group] @ queries[token, head].astype(np.float64) * softmax_scale
            sink = None if sinks is None else float(sinks[head])
            out[token, head] = attend(scores, stored_values[:, head // group], sink)
    return from_float32(out, key.model_dtype)


def mla_append_attention(
    q: Array, latent: Array, cache: CacheTensor, batch: Batch, *, kv_lora_rank: int, softmax_scale: float
) -> Array:
    """MLA in absorbed form: one latent row is the key of every head, and its first kv_lora_rank elements the value."""
    return append_attention(
        q, latent[:, None], None, cache, None, batch, softmax_scale=softmax_scale, value_dim=kv_lora_rank
    )


def copy_blocks(tensors: Sequence[Array], src_ids: Array, dst_ids: Array) -> None:
    """Copy block src_ids[i] over block dst_ids[i] in every array [blocks, ...].

    Raises:
        ConfigError: a destination that is a source, or occurs twice.
    """
    if len(set(dst_ids.tolist())) != len(dst_ids) or set(dst_ids.tolist()) & set(src_ids.tolist()):
        raise ConfigError("a destination block may be no source and occur only once")
    for tensor in tensors:
        tensor[dst_ids] = tensor[src_ids]
