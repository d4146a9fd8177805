"""Attention over the paged cache: writes this step's keys and values, then attends over what the cache holds.

Called once a layer and step. Layouts and arithmetic: fastkv/ops/reference.py says what every op means.
"""

from __future__ import annotations

import paddle
from paddle import Tensor

from fastkv.errors import ConfigError
from fastkv.ops import _direct
from fastkv.ops._load import run_op
from fastkv.ops.batch import AttentionBatch, Rope
from fastkv.ops.cache import LayerCache
from fastkv.ops.checks import check_out, check_rows, check_tensor, is_static_graph


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
    if not is_static_graph() and not cache.is_latent:
        layer = cache.view()
        result = _direct.attend(
            q,
            k,
            v,
            layer,
            batch.view(),
            out_dim=layer.value_dim,
            softmax_scale=softmax_scale,
            rope=None if rope is None else rope.view(),
            window=window,
            sinks=sinks,
            out=out,
        )
        if result is not None:
            return result
    check_rows(q, "q")
    check_rows(k, "k")
    check_rows(v, "v")
    if cache.is_latent:
        raise ConfigError("append_attention needs a key and a value cache, but got a latent one: mla_append_attention")
    if sinks is not None:
        check_tensor(sinks, "sinks", None, 1, "float32 [num_heads]")
    if out is not None:
        check_out(out, q.dtype, [*q.shape[:2], v.shape[2]])
    result = _run_append_attention(q, k, v, cache, batch, softmax_scale, rope, window, sinks)
    return result if out is None else paddle.assign(result, out)


def _run_append_attention(
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
    """The registered op, which refuses in words what does not fit."""
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
    if not is_static_graph() and cache.is_latent:
        args = (q, latent, None, cache.view(), batch.view())
        out = _direct.attend(*args, out_dim=kv_lora_rank, softmax_scale=softmax_scale)
        if out is not None:
            return out
    check_rows(q, "q")
    check_tensor(latent, "latent", None, 2, "[num_tokens, kv_lora_rank + qk_rope_head_dim]")
    if not cache.is_latent:
        raise ConfigError("mla_append_attention needs a latent cache, but got keys and values: append_attention")
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
