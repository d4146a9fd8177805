"""Attention over the paged cache: writes this step's keys and values, then attends over what the cache holds.

Called once a layer and step. Layouts and arithmetic: fastkv/ops/reference.py says what every op means.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from fastkv.errors import ConfigError
from fastkv.ops import _load
from fastkv.ops._load import run_op
from fastkv.ops.batch import AttentionBatch, Rope
from fastkv.ops.cache import LayerCache
from fastkv.ops.checks import is_static_graph


def append_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    softmax_scale: float,
    rope: Rope | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Write k and v into the cache, quantising, then attend each query over cache positions 0 to its own.

    K and V are read from the cache only, so what is attended is what is stored. One call serves prefill, chunked
    prefill, decode and multi-token verification. Modifies the cache's tensors in place.

    Args:
        q: [num_tokens, num_heads, head_dim], float32, float16 or bfloat16; an unquantised cache has the same dtype.
        k: [num_tokens, kv_heads, head_dim], dtype of q.
        v: [num_tokens, kv_heads, v_head_dim], dtype of q.
        cache: this layer's cache.
        batch: this step's requests.
        softmax_scale: multiplies q . k, usually head_dim ** -0.5.
        rope: rotates q and k inside the op; None when that has been done.
        window: attend the last `window` positions, the own one included; 0 attends all.
        sinks: float32 [num_heads], logits added to the soft-max denominator.
        out: where the result goes, shape and dtype as below, contiguous, no memory of q, k or v: an engine can use one
            for all layers of a step (making a tensor takes Paddle 30 us between two layers). None makes a new one.

    Returns:
        [num_tokens, num_heads, v_head_dim] in q's dtype; zeros where there is nothing to attend.

    Raises:
        ConfigError: tensors that do not fit each other or the quantisation type.
        IndexError: a block id, slot or position out of range. Nothing has been written then.
    """
    if _is_traced(q):
        result = _traced_attention(q, k, v, cache, batch, softmax_scale, rope, window, sinks)
        return result if out is None else paddle.assign(result, out)
    rotary = None if rope is None else rope.view
    try:
        return _load.native.append_attention(cache.view, batch.view, softmax_scale, rotary, window, sinks, out, q, k, v)
    except (ValueError, IndexError) as error:
        raise _load.own_error(error) from None


def append_attention_qkv(
    qkv: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    softmax_scale: float,
    rope: Rope | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """append_attention of a fused projection, taken as the matrix product leaves it; the same results bit for bit.

    Splitting it first costs an engine more than a small decode call (40 us a layer, 100 after a layer's weights).

    Args:
        qkv: [num_tokens, num_heads * head_dim + kv_heads * (head_dim + v_head_dim)]: of each token all queries, then
            all keys, then all values; dtype as q of append_attention. The cache says kv_heads and both dims, the rest
            are queries.
        out: [num_tokens, num_heads * v_head_dim]. The other arguments as for append_attention.

    Returns:
        [num_tokens, num_heads * v_head_dim] in qkv's dtype, as the output projection takes it.

    Raises:
        ConfigError, IndexError: as append_attention.

    Source: engines whose attention op takes the fused projection, as FastDeploy's append_attention.
    """
    if _is_traced(qkv):
        q, k, v = _split(qkv, cache)
        result = _traced_attention(q, k, v, cache, batch, softmax_scale, rope, window, sinks).flatten(1)
        return result if out is None else paddle.assign(result, out)
    rotary = None if rope is None else rope.view
    try:
        return _load.native.append_attention_qkv(cache.view, batch.view, softmax_scale, rotary, window, sinks, out, qkv)
    except (ValueError, IndexError) as error:
        raise _load.own_error(error) from None


def _is_traced(x: Any) -> bool:
    """Whether x is a variable of a static graph: then the call becomes a registered op there."""
    return not isinstance(x, Tensor) and is_static_graph()


def _split(qkv: Any, cache: LayerCache) -> tuple[Any, Any, Any]:
    """Queries, keys and values of a traced fused projection, [num_tokens, heads, dim] each; the op checks them."""
    if cache.value is None:
        raise ConfigError("append_attention_qkv needs a key and a value cache, but got a latent one")
    kv_heads = int(cache.key.shape[1])
    key_dim, value_dim = (int(x.shape[3]) * cache.storage.elements_per_byte for x in (cache.key, cache.value))
    q, k, v = qkv.split([-1, kv_heads * key_dim, kv_heads * value_dim], axis=1)
    return q.reshape([0, -1, key_dim]), k.reshape([0, kv_heads, key_dim]), v.reshape([0, kv_heads, value_dim])


def _traced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    softmax_scale: float,
    rope: Rope | None,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """The registered op, which allocates its result."""
    return run_op(
        "fastkv_append_attention",
        q,
        k,
        v,
        *cache.op_inputs,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        batch.slot_mapping,
        rope.cos if rope is not None else None,
        rope.sin if rope is not None else None,
        sinks,
        cache.storage.name,
        softmax_scale,
        rope.style if rope is not None else "neox",
        window,
    )[0]


def mla_append_attention(
    q: Tensor,
    latent: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
) -> Tensor:
    """MLA in absorbed form: write the latents, then attend over the latent cache.

    A key is a whole latent row, its value the first kv_lora_rank elements of the same row. Modifies the cache in place.

    Args:
        q: [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim], absorbed and rotated already.
        latent: [num_tokens, kv_lora_rank + qk_rope_head_dim], rotated already, dtype of q.
        cache: latent cache [blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim]: in q's dtype, or
            float8_e4m3fn with one static scale [1].
        batch: this step's requests.
        kv_lora_rank: length of a value.
        softmax_scale: multiplies q . k.

    Returns:
        [num_tokens, num_heads, kv_lora_rank] in q's dtype.

    Raises:
        ConfigError: tensors that do not fit each other or the quantisation type.
        IndexError: a block id or slot out of range. Nothing has been written then.
    """
    if not _is_traced(q):
        try:
            return _load.native.mla_append_attention(
                cache.view, batch.view, softmax_scale, None, 0, q, latent, kv_lora_rank
            )
        except (ValueError, IndexError) as error:
            raise _load.own_error(error) from None
    return run_op(
        "fastkv_mla_append_attention",
        q,
        latent,
        cache.key,
        cache.op_inputs[2],
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        batch.slot_mapping,
        cache.storage.name,
        softmax_scale,
        kv_lora_rank,
    )[0]
