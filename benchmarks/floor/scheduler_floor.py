"""Python face of scheduler_floor.cc. Each call works on several prompts and returns nanoseconds measured in C++."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import load_floor

Prompts = npt.NDArray[np.int32]  # [count, at least blocks * block_size], each row contiguous
Ids = npt.NDArray[np.int32]  # [count, blocks]

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64
_SIGNATURES = {
    "floor_new": (_POINTER, (_INT, _INT)),
    "floor_delete": (None, (_POINTER,)),
    "floor_bytes": (_INT, (_POINTER,)),
    "floor_free_blocks": (_INT, (_POINTER,)),
    "floor_match": (ctypes.c_double, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "floor_acquire": (ctypes.c_double, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "floor_release": (ctypes.c_double, (_POINTER, _INT, _INT, _POINTER)),
    "floor_take": (ctypes.c_double, (_POINTER, _INT, _INT, _POINTER)),
    "floor_give_back": (ctypes.c_double, (_POINTER, _INT, _INT, _POINTER)),
    "floor_publish": (ctypes.c_double, (_POINTER, _POINTER, _INT, _INT, _POINTER)),
    "floor_life": (ctypes.c_double, (_POINTER, _POINTER, _INT, _INT, _POINTER)),
    "floor_digest": (ctypes.c_double, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
}


class SchedulerFloor:
    """A pool of `pool` blocks of `block_size` tokens.

    Every call takes `count` prompts of `blocks` blocks. Block ids are int32 [count, blocks] and go from the call that
    fills them (acquire, take, life) to those that use them (publish, release, give_back). Misuse is not checked.
    """

    def __init__(self, pool: int, block_size: int) -> None:
        self._lib = load_floor(Path(__file__).with_name("scheduler_floor.cc"))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
        self.block_size = block_size
        self._floor: int | None = self._lib.floor_new(pool, block_size)

    def close(self) -> None:
        """Give the memory back."""
        if self._floor is not None:
            self._lib.floor_delete(self._floor)
            self._floor = None

    @property
    def bytes(self) -> int:
        """Bytes of table, nodes and free list, without the tokens."""
        return int(self._lib.floor_bytes(self._floor))

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return int(self._lib.floor_free_blocks(self._floor))

    def match(self, prompts: Prompts, blocks: int, ids: Ids) -> tuple[float, int]:
        """Look the prompts up; returns (ns, blocks found)."""
        return self._look_up(self._lib.floor_match, prompts, blocks, ids)

    def acquire(self, prompts: Prompts, blocks: int, ids: Ids) -> tuple[float, int]:
        """Look the prompts up and hold what is found; returns (ns, blocks found)."""
        return self._look_up(self._lib.floor_acquire, prompts, blocks, ids)

    def release(self, ids: Ids) -> float:
        """Give holds back; what nobody holds goes to the end of the LRU list."""
        return float(self._lib.floor_release(self._floor, *ids.shape, ids.ctypes.data))

    def take(self, ids: Ids) -> float:
        """Fill ids with free blocks, evicting as needed."""
        return float(self._lib.floor_take(self._floor, *ids.shape, ids.ctypes.data))

    def give_back(self, ids: Ids) -> float:
        """Put unpublished blocks back on the free list."""
        return float(self._lib.floor_give_back(self._floor, *ids.shape, ids.ctypes.data))

    def publish(self, prompts: Prompts, ids: Ids) -> float:
        """Make the prompts findable under ids, held once."""
        return float(self._lib.floor_publish(self._floor, _rows(prompts), *ids.shape, ids.ctypes.data))

    def life(self, prompts: Prompts, ids: Ids) -> float:
        """Look up, hold, take and publish the rest, release."""
        return float(self._lib.floor_life(self._floor, _rows(prompts), *ids.shape, ids.ctypes.data))

    def digest(self, prompts: Prompts, blocks: int, root: bytes, out: npt.NDArray[np.uint8]) -> float:
        """Chained SHA-256 digests of all blocks into out uint8 [count, blocks, 32]."""
        return float(self._lib.floor_digest(self._floor, _rows(prompts), len(prompts), blocks, root, out.ctypes.data))

    def _look_up(self, function: object, prompts: Prompts, blocks: int, ids: Ids) -> tuple[float, int]:
        assert callable(function)
        found = _INT()
        ns = float(function(self._floor, _rows(prompts), len(prompts), blocks, ids.ctypes.data, ctypes.byref(found)))
        return ns, found.value


def _rows(prompts: Prompts) -> ctypes.Array[ctypes.c_void_p]:
    """The address of each prompt."""
    start, stride = prompts.ctypes.data, prompts.strides[0]
    return (_POINTER * len(prompts))(*range(start, start + stride * len(prompts), stride))
