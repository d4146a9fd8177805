"""append_attention without Paddle's dispatch: pointers and shapes go straight to the kernels, by ctypes.

Called by fastkv.ops.attention in dynamic mode. `attend` takes a call only if everything fits (dtypes, shapes,
contiguity); anything else is left to the registered op, which refuses it in words, or serves it. So what is refused,
and how, is written once, in custom_ops/paddle. Paddle's operations on the CPU have ended when they return, so the
memory behind a tensor is what the tensor says.

The structs mirror custom_ops/include/fastkv/params.h; their sizes are compared when the library is first used.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor

from fastkv.errors import ConfigError
from fastkv.ops._load import load_ops

if TYPE_CHECKING:
    from fastkv.ops.batch import AttentionBatch, Rope
    from fastkv.ops.cache import LayerCache

_INVALID, _OUT_OF_RANGE = 1, 2  # StatusCode
_HAS_DEVICES = paddle.device.is_compiled_with_cuda() or paddle.device.is_compiled_with_xpu()
_empty: Any = paddle._C_ops.empty  # paddle.empty, less its checks of arguments
_PLACE = paddle.CPUPlace()


class _Quant(Structure):
    _fields_ = (
        ("storage", c_int),
        ("scale", c_void_p),
        ("zero_point", c_void_p),
        ("head_stride", c_int64),
        ("channel_stride", c_int64),
        ("token_scale", c_void_p),
    )


class _Cache(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int),
        ("num_blocks", c_int64),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("dim", c_int64),
        ("row_bytes", c_int64),
        ("quant", _Quant),
    )


class _Layer(Structure):
    _fields_ = (("key", _Cache), ("value", _Cache))


class _Batch(Structure):
    _fields_ = (
        ("batch", c_int64),
        ("num_tokens", c_int64),
        ("max_blocks", c_int64),
        ("block_tables", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("slot_mapping", c_void_p),
    )


class _Rope(Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("max_position", c_int64),
        ("half", c_int64),
        ("interleaved", c_bool),
    )


class _Library:
    """The C functions, and the numbers of the storage types."""

    def __init__(self) -> None:
        library = load_ops()
        sizes = [library.fastkv_struct_bytes(which) for which in range(3)]
        if sizes != [ctypes.sizeof(x) for x in (_Layer, _Batch, _Rope)]:
            raise ConfigError("the compiled ops are older than fastkv's Python files; build them again")
        self.attend = library.fastkv_attend
        self.attend.argtypes = (
            *(POINTER(_Layer), POINTER(_Batch), POINTER(_Rope)),
            *[c_void_p] * 5,
            *(c_int, c_int64, c_int64, c_float, c_int64),
        )
        self.last_refusal = library.fastkv_last_refusal
        self.last_refusal.restype = c_char_p
        self.storage_codes: dict[str, int] = {}
        text = ctypes.create_string_buffer(64)
        while library.fastkv_storage_row(len(self.storage_codes), text, len(text)):
            self.storage_codes[text.value.split()[0].decode()] = len(self.storage_codes)


_library: _Library | None = None


class LayerView:
    """A LayerCache as the kernels take it. Holds addresses: the LayerCache keeps the memory."""

    __slots__ = ("dtype", "key_dim", "kv_heads", "pointer", "struct", "value_dim")

    def __init__(self, cache: LayerCache) -> None:
        global _library
        if _library is None:
            _library = _Library()
        key, value, key_scale, value_scale, key_zero, value_zero = cache.op_inputs
        assert key is not None
        code = _library.storage_codes[cache.storage.name]
        self.struct = _Layer(_cache(code, cache, key, key_scale, key_zero))
        self.kv_heads = int(key.shape[1])
        self.key_dim = self.struct.key.dim
        self.value_dim = 0
        if value is not None:
            self.struct.value = _cache(code, cache, value, value_scale, value_zero)
            self.value_dim = self.struct.value.dim
        self.dtype = key.dtype if cache.storage.quant_type is None else None
        self.pointer = byref(self.struct)


def _cache(code: int, cache: LayerCache, data: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> _Cache:
    blocks, heads, block_size, stored_dim = (int(n) for n in data.shape)
    dim = stored_dim * cache.storage.elements_per_byte
    quant = _Quant(storage=code)
    if cache.key_scale is not None and scale is not None:
        quant.token_scale = scale.data_ptr()
    elif scale is not None:
        is_per_channel = int(scale.shape[0]) == heads * dim
        quant.scale = scale.data_ptr()
        quant.head_stride, quant.channel_stride = (dim, 1) if is_per_channel else (1, 0)
        quant.zero_point = None if zero_point is None else zero_point.data_ptr()
    dtype = max(_dtype_code(data.dtype), 0)
    row_bytes = stored_dim * data.element_size()
    return _Cache(data.data_ptr(), dtype, blocks, heads, block_size, dim, row_bytes, quant)


class BatchView:
    """An AttentionBatch as the kernels take it."""

    __slots__ = ("num_tokens", "pointer", "struct")

    def __init__(self, batch: AttentionBatch) -> None:
        tables = batch.block_tables
        self.num_tokens = batch.num_tokens
        self.struct = _Batch(
            int(tables.shape[0]),
            self.num_tokens,
            int(tables.shape[1]),
            *(x.data_ptr() for x in (tables, batch.query_start, batch.context_lens, batch.slot_mapping)),
        )
        self.pointer = byref(self.struct)


class RopeView:
    """A Rope as the kernels take it."""

    __slots__ = ("pointer", "rotary_dim", "struct")

    def __init__(self, rope: Rope) -> None:
        length, half = (int(n) for n in rope.cos.shape)
        self.rotary_dim = 2 * half
        self.struct = _Rope(rope.cos.data_ptr(), rope.sin.data_ptr(), length, half, rope.style == "interleaved")
        self.pointer = byref(self.struct)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    layer: LayerView,
    batch: BatchView,
    *,
    out_dim: int,
    softmax_scale: float,
    rope: RopeView | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Write and attend; None if anything does not fit, and nothing was done. v None: a latent cache.

    Raises:
        ConfigError, IndexError: contents that the kernels refuse, as the op does. Nothing has been written then.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        return None
    num_tokens, dtype, shape = batch.num_tokens, q.dtype, q.shape
    if len(shape) != 3 or shape[0] != num_tokens or shape[2] != layer.key_dim or not q.is_contiguous():
        return None
    num_heads = shape[1]
    key_shape = [num_tokens, layer.kv_heads, layer.key_dim]
    if v is None:
        fits = 1 <= out_dim <= layer.key_dim and _is_rows(k, dtype, key_shape[::2])
    else:
        fits = _is_rows(k, dtype, key_shape) and _is_rows(v, dtype, [num_tokens, layer.kv_heads, out_dim])
    code = _dtype_code(dtype)
    if (
        not fits
        or code < 0
        or (layer.dtype is not None and layer.dtype is not dtype)
        or num_heads % layer.kv_heads
        or not num_heads
        or not num_tokens
        or window < 0
        or (rope is not None and not 2 <= rope.rotary_dim <= layer.key_dim)
        or (sinks is not None and not _is_rows(sinks, paddle.float32, [num_heads]))
        or (_HAS_DEVICES and not all(x.place.is_cpu_place() for x in (q, k, v, sinks, out) if x is not None))
        or (out is not None and not _is_rows(out, dtype, [num_tokens, num_heads, out_dim]))
    ):
        return None
    inputs = (q.data_ptr(), k.data_ptr(), None if v is None else v.data_ptr())
    if out is None:
        out = _empty([num_tokens, num_heads, out_dim], dtype, _PLACE)
    elif out.data_ptr() in inputs:
        raise ConfigError("out is the memory of q, k or v, which are read while it is written; give another tensor")
    assert _library is not None
    status = _library.attend(
        layer.pointer,
        batch.pointer,
        None if rope is None else rope.pointer,
        None if sinks is None else sinks.data_ptr(),
        *inputs,
        out.data_ptr(),
        code,
        num_heads,
        int(out_dim),
        float(softmax_scale),  # NumPy's scalars are none of ctypes' numbers
        int(window),
    )
    if status:
        message = _library.last_refusal().decode()
        if status == _OUT_OF_RANGE:
            raise IndexError(message)
        raise ConfigError(message) if status == _INVALID else MemoryError(message)
    return out


def _is_rows(x: Any, dtype: Any, shape: list[int]) -> bool:
    return isinstance(x, Tensor) and x.dtype is dtype and x.shape == shape and x.is_contiguous()


def _dtype_code(dtype: Any) -> int:
    """ModelDtype. By identity, which dtypes allow: comparing two takes Paddle 2 us, and this runs once a layer."""
    if dtype is paddle.float32:
        return 0
    if dtype is paddle.bfloat16:
        return 2
    return 1 if dtype is paddle.float16 else -1
