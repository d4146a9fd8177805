"""Python face of attention_floor.cc: rates of the machine on Paddle's OpenMP threads."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import load_floor

_ROUNDS = 100_000  # some 10 ms
_FLOPS_PER_ROUND = 192


class AttentionFloor:
    """Needs Paddle imported first: its threads are the ones that are measured."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("paddle")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError("the attention floor runs on Paddle's threads: install paddlepaddle")
        libs = Path(next(iter(spec.submodule_search_locations))) / "libs"
        # the runtime named first answers for every symbol, so the one that -fopenmp appends is not linked
        link = [f"-L{libs}", f"-Wl,-rpath,{libs}", "-Wl,--no-as-needed", "-l:libiomp5.so", "-Wl,--as-needed"]
        self._lib = load_floor(Path(__file__).with_name("attention_floor.cc"), "-fopenmp", *link)
        for name in ("floor_read", "floor_copy", "floor_multiply_add"):
            getattr(self._lib, name).restype = ctypes.c_double

    @property
    def num_threads(self) -> int:
        """Threads of a parallel region."""
        return int(self._lib.floor_threads())

    def read(self, data: npt.NDArray[np.uint8]) -> float:
        """Bytes a second of reading data once."""
        seconds = self._lib.floor_read(ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.nbytes))
        return float(data.nbytes / seconds)

    def copy(self, to: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> float:
        """Bytes a second, read plus written, of copying source once."""
        pointers = (ctypes.c_void_p(to.ctypes.data), ctypes.c_void_p(source.ctypes.data))
        return float(2 * source.nbytes / self._lib.floor_copy(*pointers, ctypes.c_int64(source.nbytes)))

    def multiply_add(self) -> float:
        """Floating-point operations a second."""
        return (
            _ROUNDS * _FLOPS_PER_ROUND * self.num_threads / float(self._lib.floor_multiply_add(ctypes.c_int64(_ROUNDS)))
        )
