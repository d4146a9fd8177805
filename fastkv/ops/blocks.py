"""Ops that move cache contents without attending: write, gather (dequantise) and block copies."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from fastkv.errors import ConfigError
from fastkv.ops import _load
from fastkv.ops._load import run_op
from fastkv.ops.cache import LayerCache
from fastkv.ops.checks import check_out, check_tensor, is_static_graph


def write_cache(k: Tensor, v: Tensor | None, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Quantise rows into the slots, in place; slot -1 is not written.

    Args:
        k: [num_tokens, kv_heads, head_dim] in the model's dtype; for a latent cache [num_tokens, latent_dim] or
            [num_tokens, 1, latent_dim].
        v: [num_tokens, kv_heads, v_head_dim], dtype of k; None for a latent cache.
        cache: this layer's cache.
        slot_mapping: int64 [num_tokens]; a slot given twice ends with either row.

    Raises:
        ConfigError: tensors that do not fit each other or the quantisation type.
        IndexError: a slot out of range. Nothing has been written then.
    """
    if cache.is_latent and isinstance(k, Tensor) and k.ndim == 2:
        k = k.unsqueeze(1)
    check_tensor(k, "k", None, 3, "[num_tokens, kv_heads, head_dim]")
    if (v is None) != cache.is_latent:
        raise ConfigError("v must be given for a cache with values, and must be None for a latent cache")
    if v is not None:
        check_tensor(v, "v", None, 3, "[num_tokens, kv_heads, v_head_dim]")
    check_tensor(slot_mapping, "slot_mapping", paddle.int64, 1, "int64 [num_tokens]")
    run_op("fastkv_write_cache", k, v, *cache.op_inputs, slot_mapping, cache.storage.name)


def gather_cache(
    cache: LayerCache, slots: Tensor, out: tuple[Tensor, Tensor | None] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Read rows back, dequantised.

    Args:
        cache: this layer's cache.
        slots: int64 [n], each in range (-1 is not).
        out: where to, float32 tensors shaped as what is returned, written in place. Fresh ones otherwise, whose pages
            the system has yet to hand out: for megabytes that takes longer than reading the cache.

    Returns:
        Keys float32 [n, kv_heads, head_dim] and values float32 [n, kv_heads, v_head_dim]; None for the values of a
        latent cache.

    Raises:
        ConfigError: dtype, shape or contiguity of slots or out.
        IndexError: a slot out of range. Nothing has been written then.
    """
    check_tensor(slots, "slots", paddle.int64, 1, "int64 [n]")
    key, value, key_scale, value_scale, key_zero_point, value_zero_point = cache.op_inputs
    key_out, value_out = _check_out(cache, slots, out) if out is not None else (None, None)
    name = cache.storage.name
    what = "latent" if cache.is_latent else "key"
    keys = _gather(key_out, key, key_scale, key_zero_point, slots, name, what)
    if value is None:
        return keys, None
    return keys, _gather(value_out, value, value_scale, value_zero_point, slots, name, "value")


def _gather(out: Tensor | None, *args: object) -> Tensor:
    if out is None:
        return run_op("fastkv_gather_cache", *args)[0]
    *tensors, name, what = args
    run_op("fastkv_gather_cache_into", *tensors, out, name, what)
    return out


def _check_out(cache: LayerCache, slots: Tensor, out: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Both are checked before either is written."""
    if len(out) != 2 or (out[1] is None) != cache.is_latent:
        raise ConfigError("out must be a pair: where keys go, and where values go (None for a latent cache)")
    for tensor, source in zip(out, (cache.key, cache.value), strict=True):
        if tensor is not None and source is not None:
            dim = int(source.shape[3]) * cache.storage.elements_per_byte
            check_out(tensor, paddle.float32, [int(slots.shape[0]), int(source.shape[1]), dim])
    return out


def copy_blocks(tensors: Sequence[Tensor], src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copy block src_ids[i] over block dst_ids[i] in every tensor, in place: bytes, whatever the dtype.

    Args:
        tensors: each [blocks, ...], contiguous, on the CPU.
        src_ids: int64 [n].
        dst_ids: int64 [n]; no destination may be a source or occur twice.

    Raises:
        ConfigError: dtype, shape, contiguity, or overlapping ids.
        IndexError: a block id out of range. Nothing has been written then.
    """
    if is_static_graph():
        if tensors:
            run_op("fastkv_copy_blocks", list(tensors), src_ids, dst_ids)
        return
    _load.load_ops()
    try:
        _load.native.copy_blocks(list(tensors), src_ids, dst_ids)
    except (ValueError, IndexError) as error:
        raise _load.own_error(error) from None
