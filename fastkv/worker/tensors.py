"""Allocation of device and host memory from a CacheSpec. Both v0 and v1 allocate here and nowhere else.

On a CPU the "device" is anonymous private memory that Paddle tensors view without a copy: pages exist once they are
touched, so a cache costs what it holds, and it starts as zeros. On a GPU a tensor is Paddle's own. Host memory is one
page-aligned array of block records, pinned when the device is a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import paddle
from paddle.utils.dlpack import from_dlpack

from fastkv.core.spec import CacheSpec, LayerGroup, Role, RoleSpec
from fastkv.errors import ConfigError

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

ByteArray = npt.NDArray[np.uint8]
CacheTensors = dict[tuple[int, Role], paddle.Tensor]
"""(global layer id, role) -> tensor [num_blocks, *block_shape]."""


def check_device(device: str) -> str:
    """Return device ("cpu", "gpu" or "gpu:N") if this Paddle can use it.

    Raises:
        ConfigError: unknown device, or a GPU without a GPU build of Paddle.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "gpu") or (index and not index.isdigit()):
        raise ConfigError(f"unknown device {device!r}; allowed: cpu, gpu, gpu:N")
    if kind == "gpu" and not paddle.device.is_compiled_with_cuda():
        raise ConfigError(
            f"device {device} was asked for, but the installed Paddle is a CPU build; install paddlepaddle-gpu "
            "or set device.type: cpu"
        )
    return device


def device_capacity_bytes(device: str) -> int:
    """Bytes that caches on this device could use: the GPU's memory, or physical memory within the container's limit."""
    if device != "cpu":
        return int(paddle.device.cuda.get_device_properties(device).total_memory)
    capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(capacity, int(limit)) if limit.isdigit() else capacity


def check_fits(nbytes: int, capacity_bytes: int, what: str, remedy: str) -> None:
    """Refuse memory that a machine does not have: pages appear when they are touched, so asking would succeed.

    Raises:
        ConfigError: nbytes exceed capacity_bytes.
    """
    if nbytes > capacity_bytes:
        raise ConfigError(f"{what} need {nbytes} bytes, which this machine cannot give ({capacity_bytes}); {remedy}")


def allocate_group(group: LayerGroup, pool_blocks: int, device: str, held_bytes: int = 0) -> CacheTensors:
    """Device tensors of one layer group, zero-filled.

    Args:
        group: which layers, roles, dtypes and shapes.
        pool_blocks: blocks of the shared pool; the group's expand ratio is applied here.
        device: "cpu", "gpu" or "gpu:N".
        held_bytes: of the caches that are there already; all of them have to fit the device.

    Returns:
        (global layer id, role) -> contiguous tensor [num_blocks, *block_shape] in the role's storage dtype.

    Raises:
        ConfigError: fewer than one block, or the device has not enough memory.
    """
    if pool_blocks < 1:
        raise ConfigError(f"a cache needs at least 1 block, got {pool_blocks}")
    num_blocks = group.num_blocks(pool_blocks)
    what, remedy = f"{num_blocks} blocks of the {group.name} caches", "lower cache.device_memory or num_device_blocks"
    nbytes = num_blocks * group.block_bytes
    beside = f", beside {held_bytes} of the other caches," if held_bytes else ""
    check_fits(nbytes + held_bytes, device_capacity_bytes(device), what + beside, remedy)
    try:
        return {
            (layer, role.role): _allocate_role(role, num_blocks, device)
            for layer in group.layers
            for role in group.roles
        }
    except (MemoryError, OSError) as error:
        raise ConfigError(f"{what} need {nbytes} bytes, which {device} cannot give ({error}); {remedy}") from error


def allocate_host_records(spec: CacheSpec, num_blocks: int, *, pinned: bool) -> ByteArray:
    """Host pool: block records as CacheSpec lays them out.

    Args:
        spec: gives the record stride.
        num_blocks: records, at least 1.
        pinned: lock the pages for copies from and to a GPU.

    Returns:
        uint8 [num_blocks, record_stride_bytes], zero-filled, starting on a page.

    Raises:
        ConfigError: the machine has not enough memory.
    """
    nbytes = num_blocks * spec.record_stride_bytes
    try:
        flat = _pinned_bytes(nbytes) if pinned else _anonymous_bytes(nbytes)
    except (MemoryError, OSError) as error:
        raise ConfigError(
            f"{num_blocks} host blocks need {nbytes} bytes, which this machine cannot give ({error}); "
            "lower cache.host_memory or cache.num_host_blocks"
        ) from error
    return flat.reshape(num_blocks, spec.record_stride_bytes)


def tensor_over(memory: ByteArray, role: RoleSpec, shape: Sequence[int]) -> paddle.Tensor:
    """A CPU tensor of the role's storage dtype over these bytes, without a copy; it keeps them alive."""
    return from_dlpack(memory).view(getattr(paddle, role.dtype)).reshape(list(shape))


def zero_tensors(tensors: Iterable[paddle.Tensor]) -> None:
    """Fill cache tensors with zero bytes, in place."""
    for tensor in tensors:
        tensor.zero_()


def total_bytes(tensors: Iterable[paddle.Tensor]) -> int:
    """Bytes that the tensors really hold, asked of the tensors themselves."""
    return sum(int(np.prod(t.shape, dtype=np.int64)) * t.element_size() for t in tensors)


def _allocate_role(role: RoleSpec, num_blocks: int, device: str) -> paddle.Tensor:
    if device == "cpu":
        return tensor_over(_anonymous_bytes(num_blocks * role.block_bytes), role, role.shape(num_blocks))
    with paddle.device.device_guard(device):
        return paddle.zeros(role.shape(num_blocks), dtype=getattr(paddle, role.dtype))


def _anonymous_bytes(nbytes: int) -> ByteArray:
    """Page-aligned zeros in memory of their own; unmapped when the last view of them goes."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Fresh 4 KiB pages made copies into a cache 3-7 times slower than huge pages.
    if nbytes >= 2 << 20:
        with contextlib.suppress(OSError):  # a kernel that has none: slower, and nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _pinned_bytes(nbytes: int) -> ByteArray:
    """Page-locked zeros, owned by a Paddle tensor that the array keeps alive (`.numpy()` would copy)."""
    tensor = paddle.zeros([nbytes], dtype="uint8").pin_memory()
    buffer = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    buffer.owner = tensor  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(buffer)
