"""Gives pages of cache memory back to the system without giving up their addresses. Called by CacheController.sleep.

On Linux, MADV_DONTNEED on private anonymous memory drops the pages at once; the next touch finds zeros in fresh ones.
That is what allocation in tensors.py hands out on a CPU, so a sleeping cache costs address space only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable

import paddle

from fastkv.errors import ConfigError
from fastkv.worker.tensors import ByteArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def release_tensors(tensors: Iterable[paddle.Tensor]) -> None:
    """Drop the pages of cache tensors in CPU memory; they read as zeros afterwards.

    Raises:
        ConfigError: the system refused.
    """
    for tensor in tensors:
        _release(tensor.data_ptr(), tensor.size * tensor.element_size())


def release_array(array: ByteArray) -> None:
    """Drop the pages of host records, likewise. Raises ConfigError."""
    _release(array.ctypes.data, array.nbytes)


def _release(address: int, nbytes: int) -> None:
    page = mmap.PAGESIZE
    if address % page:
        raise ConfigError(f"memory at {address:#x} does not start on a page, so it cannot be given back alone")
    if _libc.madvise(address, -(-nbytes // page) * page, mmap.MADV_DONTNEED):
        code = ctypes.get_errno()
        raise ConfigError(f"the system does not take back {nbytes} bytes of cache memory: {os.strerror(code)}")
