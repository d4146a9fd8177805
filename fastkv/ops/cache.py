"""Frozen views of one layer's cache: its tensors, and what they are quantised with.

Built by whoever owns the memory (worker/device_caches.py), or by an engine from tensors of its own. Everything that
can be checked once is checked here, so that the ops' Python faces, called for every layer of every step, need not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastkv.core.dtype import CODE_DTYPE, MODEL_DTYPES, AttentionKind, ScaleKind, StorageDtype, check_legal
from fastkv.errors import ConfigError
from fastkv.ops._load import make_view
from fastkv.ops.checks import check_memory, describe

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = 1.0 / SMALLEST_SCALE


@dataclass(frozen=True, slots=True)
class StaticScales:
    """Static scales and zero points of one layer of one rank; contents are checked once, here.

    Args:
        key_scale: float32, per channel [kv_heads * head_dim] or per head [kv_heads]; [1] for MLA's latent. NumPy
            array or Paddle tensor; kept as a Paddle tensor on the CPU.
        value_scale: likewise with the value's head_dim; None for MLA.
        key_zero_point: same shape as key_scale, for types with a zero point.
        value_zero_point: same shape as value_scale.

    Raises:
        ConfigError: not float32, not one-dimensional, or a value that is zero, negative, not finite or subnormal.
    """

    key_scale: Any
    value_scale: Any = None
    key_zero_point: Any = None
    value_zero_point: Any = None

    def __post_init__(self) -> None:
        for name in ("key_scale", "value_scale", "key_zero_point", "value_zero_point"):
            given = getattr(self, name)
            if given is None and name != "key_scale":
                continue
            array = _as_array(given, name)
            if name.endswith("scale"):
                _check_scale(array, name)
            elif not np.isfinite(array).all():
                bad = int(np.flatnonzero(~np.isfinite(array))[0])
                raise ConfigError(f"{name}[{bad}] is {array[bad]}; zero points must be finite: calibrate again")
            if not (isinstance(given, Tensor) and given.place.is_cpu_place() and given.is_contiguous()):
                object.__setattr__(self, name, paddle.to_tensor(array, place=paddle.CPUPlace()))


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache as the ops take it.

    Args:
        storage: row of STORAGE_DTYPES that the tensors follow.
        key: [blocks, kv_heads, block_size, head_dim] in the model's dtype, or uint8 when quantised (4-bit types: last
            dimension halved). For MLA the latent: [blocks, 1, block_size, kv_lora_rank + qk_rope_head_dim].
        value: likewise with its own head_dim; None for MLA.
        key_scale, value_scale: dynamic scale roles, float32 [blocks, kv_heads, block_size]; None otherwise.
        static: static scales; None for types without.
        All tensors contiguous, on the CPU. They are not copied: ops write into them.

    Raises:
        ConfigError: naming what the type needs and what was given.
    """

    storage: StorageDtype
    key: Tensor
    value: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    static: StaticScales | None = None
    op_inputs: tuple[Tensor | None, ...] = field(init=False, repr=False, compare=False)
    """key, value, their scales, their zero points: the inputs that every op takes in this order."""
    view: Any = field(init=False, repr=False, compare=False)
    """Its addresses and strides, for the kernels."""

    def __post_init__(self) -> None:
        if self.is_latent:
            check_legal(self.storage, AttentionKind.MLA)
        key_dim = _check_cache(self.storage, "latent_cache" if self.is_latent else "key_cache", self.key)
        value_dim = _check_cache(self.storage, "value_cache", self.value) if self.value is not None else 0
        if self.is_latent and self.key.shape[1] != 1:
            raise ConfigError(f"latent_cache must be [blocks, 1, block_size, dim], but is {describe(self.key)}")
        if self.value is not None and list(self.value.shape[:3]) != list(self.key.shape[:3]):
            raise ConfigError(
                "key_cache and value_cache must agree in blocks, kv_heads and block_size, but are "
                f"{describe(self.key)} and {describe(self.value)}"
            )
        self._check_roles()
        inputs: tuple[Tensor | None, ...]
        if self.storage.scales is not ScaleKind.STATIC:
            if self.static is not None:
                raise ConfigError(f"kv_cache_quant_type {self.name} takes no static scales, but some were given")
            inputs = (self.key, self.value, self.key_scale, self.value_scale, None, None)
        else:
            inputs = (self.key, self.value, *self._static_inputs(key_dim, value_dim))
        object.__setattr__(self, "op_inputs", inputs)
        object.__setattr__(self, "view", make_view("layer", *inputs, self.name))

    @property
    def name(self) -> str:
        """The quantisation type's name, "none" when not quantised."""
        return self.storage.name

    @property
    def is_latent(self) -> bool:
        """Whether this is an MLA latent cache."""
        return self.value is None

    def _check_roles(self) -> None:
        expected = list(self.key.shape[:3])
        for role in ("key_scale", "value_scale"):
            tensor = getattr(self, role)
            is_needed = self.storage.scales is ScaleKind.DYNAMIC and not (role == "value_scale" and self.is_latent)
            if not is_needed:
                if tensor is not None:
                    raise ConfigError(
                        f"kv_cache_quant_type {self.name} keeps no {role} in the cache, but one was given: "
                        f"{describe(tensor)}; static scales go into StaticScales"
                    )
                continue
            if tensor is None or tensor.dtype != paddle.float32 or list(tensor.shape) != expected:
                given = "none was given" if tensor is None else f"is {describe(tensor)}"
                raise ConfigError(
                    f"kv_cache_quant_type {self.name} keeps its scales in the cache: {role} must be float32 "
                    f"{expected}, but {given}: allocate it from CacheSpec"
                )
            check_memory(tensor, role)

    def _static_inputs(self, key_dim: int, value_dim: int) -> tuple[Tensor | None, ...]:
        if self.static is None:
            raise ConfigError(
                f"kv_cache_quant_type {self.name} needs static scales, but none were given; calibrate first "
                "(`fastkv calibrate`), then load them"
            )
        heads = int(self.key.shape[1])
        self._check_static("key", self.static.key_scale, self.static.key_zero_point, heads, key_dim)
        self._check_static("value", self.static.value_scale, self.static.value_zero_point, heads, value_dim)
        s = self.static
        return s.key_scale, s.value_scale, s.key_zero_point, s.value_zero_point

    def _check_static(self, what: str, scale: Tensor | None, zero_point: Tensor | None, heads: int, dim: int) -> None:
        is_needed = dim > 0
        sizes = (1,) if self.is_latent else (heads * dim, heads)
        legal = f"float32 [{heads * dim}] (per channel) or [{heads}] (per head)"
        if self.is_latent:
            legal = "float32 [1] (one for the latent)"
        for name, tensor, wanted in (
            (f"{what}_scale", scale, is_needed),
            (f"{what}_zero_point", zero_point, is_needed and self.storage.has_zero_point),
        ):
            if not wanted and tensor is not None:
                raise ConfigError(f"kv_cache_quant_type {self.name} takes no {name} here, but one was given")
            if wanted and (tensor is None or tensor.shape[0] not in sizes):
                given = "none was given" if tensor is None else f"it is {describe(tensor)}"
                raise ConfigError(f"kv_cache_quant_type {self.name} needs {name}, {legal}, but {given}")
        if scale is not None and zero_point is not None and list(scale.shape) != list(zero_point.shape):
            raise ConfigError(
                f"{what}_scale is {describe(scale)}, but {what}_zero_point is {describe(zero_point)}: both must be "
                "per channel or both per head"
            )


def _check_cache(storage: StorageDtype, name: str, tensor: Any) -> int:
    """Check one cache tensor; returns its logical last dimension."""
    quantised = storage.quant_type is not None
    if not isinstance(tensor, Tensor):
        raise ConfigError(
            f"{name} must be a Paddle tensor [blocks, kv_heads, block_size, dim], but is {describe(tensor)}"
        )
    dtype = str(tensor.dtype).removeprefix("paddle.")
    if dtype not in ((CODE_DTYPE,) if quantised else MODEL_DTYPES):
        stores = CODE_DTYPE if quantised else f"the model's dtype ({', '.join(MODEL_DTYPES)})"
        raise ConfigError(
            f"kv_cache_quant_type {storage.name} stores {stores}, but {name} is {describe(tensor)}: allocate it from "
            "CacheSpec"
        )
    if tensor.ndim != 4 or 0 in tensor.shape:
        raise ConfigError(
            f"{name} must be [blocks, kv_heads, block_size, dim] with nothing empty, but is {describe(tensor)}"
        )
    check_memory(tensor, name)
    return int(tensor.shape[3]) * storage.elements_per_byte


def _as_array(given: Any, name: str) -> npt.NDArray[np.float32]:
    array = given.numpy() if isinstance(given, Tensor) else np.asarray(given)
    if array.dtype != np.float32 or array.ndim != 1 or array.size == 0:
        raise ConfigError(
            f"{name} must be float32, per channel [kv_heads * head_dim] or per head [kv_heads], but is "
            f"{array.dtype} {list(array.shape)}"
        )
    return array


def _check_scale(array: npt.NDArray[np.float32], name: str) -> None:
    good = (array >= SMALLEST_SCALE) & (array <= LARGEST_SCALE)  # NaN compares false
    if not good.all():
        bad = int(np.flatnonzero(~good)[0])
        raise ConfigError(
            f"{name}[{bad}] is {array[bad]}; scales must be finite, from {SMALLEST_SCALE:.2g} to {LARGEST_SCALE:.2g}: "
            "calibrate again"
        )
