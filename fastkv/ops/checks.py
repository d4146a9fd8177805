"""Checks of tensors that Python can make and an op cannot: contiguity of the original (Paddle copies a strided tensor
before an op runs, so an in-place write would be lost without a word), and device.

In a static graph tensors have no memory yet; then only the ops' own checks run.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from fastkv.errors import ConfigError


def describe(tensor: Any) -> str:
    """For example "bfloat16 [8, 2, 16, 64]"."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    return f"{str(tensor.dtype).removeprefix('paddle.')} {list(tensor.shape)}"


def is_static_graph() -> bool:
    """Whether code is being traced into a static graph."""
    return not paddle.in_dynamic_mode()


def check_tensor(tensor: Any, name: str, dtype: Any, ndim: int, layout: str) -> None:
    """Refuse what is not a contiguous CPU tensor of the dtype and number of dimensions.

    Args:
        tensor: anything.
        name: its name in messages.
        dtype: a paddle dtype; None accepts any.
        ndim: number of dimensions.
        layout: what it must be, for messages, e.g. "int32 [batch, max_blocks]".

    Raises:
        ConfigError: what it must be and what it is.
    """
    if is_static_graph():
        return
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} must be a Paddle tensor, {layout}, but is {describe(tensor)}")
    if (dtype is not None and tensor.dtype != dtype) or tensor.ndim != ndim:
        raise ConfigError(f"{name} must be {layout}, but is {describe(tensor)}")
    check_memory(tensor, name)


def check_out(out: Any, dtype: Any, shape: list[int]) -> None:
    """Refuse what is not a contiguous CPU tensor of exactly this dtype and shape, as a place for a result.

    Raises:
        ConfigError: what it must be and what it is.
    """
    layout = f"{str(dtype).removeprefix('paddle.')} {shape}"
    check_tensor(out, "out", dtype, len(shape), layout)
    if list(out.shape) != shape:
        raise ConfigError(f"out must be {layout}, but is {describe(out)}")


def check_memory(tensor: Tensor, name: str) -> None:
    """Refuse tensors on other devices and strided ones."""
    if not tensor.place.is_cpu_place():
        raise ConfigError(
            f"{name} is on {tensor.place}, but this build of fastkv has CPU kernels only; move it with .cpu(), or "
            "allocate the caches with device cpu"
        )
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{name} is {describe(tensor)} with strides {list(tensor.strides)}, not contiguous; an in-place op would "
            "lose its writes: call .contiguous(), and keep that tensor as the cache if it is one"
        )
