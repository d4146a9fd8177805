"""Byte patterns for cache memory, the obvious copy to compare with, and copy functions that fail, stall or scribble."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind
from fastkv.core.spec import CacheSpec, Role
from fastkv.worker.controller import CacheController
from fastkv.worker.records import BlockCopier, Direction

Bytes = npt.NDArray[np.uint8]
POISON = 0xEE


def legal_pairs() -> Iterator[tuple[str, str]]:
    """(attention, quantisation type) of everything that can be stored."""
    for kind in (AttentionKind.GQA, AttentionKind.MLA, AttentionKind.DSA):
        for storage in STORAGE_DTYPES.values():
            if kind in storage.granularities:
                yield kind.value, storage.name


def bytes_of(tensor: paddle.Tensor) -> Bytes:
    """A CPU tensor's memory as uint8 [blocks, bytes of a block], writable, not a copy."""
    nbytes = int(tensor.size) * tensor.element_size()
    buffer = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    buffer.owner = tensor  # type: ignore[attr-defined]
    return np.ctypeslib.as_array(buffer).reshape(tensor.shape[0], -1)


_ROLES = {
    "key_caches": Role.KEY,
    "value_caches": Role.VALUE,
    "key_cache_scales": Role.KEY_SCALE,
    "value_cache_scales": Role.VALUE_SCALE,
    "latent_caches": Role.LATENT,
    "indexer_caches": Role.INDEXER,
}


def device_memory(controller: CacheController) -> dict[tuple[int, Role], Bytes]:
    """Every device tensor's bytes, by (layer, role)."""
    memory = {}
    for name, tensor in controller.get_kv_caches().items():
        role, layer, _ = name.rsplit("_", 2)
        memory[int(layer), _ROLES[role]] = bytes_of(tensor)
    return memory


def pattern(rank: int, layer: int, role: Role, block: int, nbytes: int) -> Bytes:
    """Bytes that belong to one (rank, layer, role, block) only."""
    seed = [rank, layer, list(Role).index(role), block]
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def _pattern_rank(controller: CacheController) -> int:
    """Ranks that hold the same bytes hold rank 0's."""
    return 0 if controller.spec.is_replicated else controller.rank


def fill(controller: CacheController) -> None:
    """Give every block of every layer and role, scratch of MTP included, its own bytes."""
    for (layer, role), memory in device_memory(controller).items():
        for block in range(len(memory)):
            memory[block] = pattern(_pattern_rank(controller), layer, role, block, memory.shape[1])


def poison(controller: CacheController) -> None:
    """Overwrite all device memory."""
    for memory in device_memory(controller).values():
        memory[:] = POISON


def wrong_pieces(controller: CacheController, holds: dict[int, int | None]) -> list[str]:
    """Which (layer, role, block) do not hold what they should.

    Args:
        holds: device block -> the block whose pattern it should hold, None for poison.
    """
    wrong = []
    for (layer, role), memory in device_memory(controller).items():
        for block, source in holds.items():
            expected: Any = (
                POISON if source is None else pattern(_pattern_rank(controller), layer, role, source, memory.shape[1])
            )
            if not (memory[block] == expected).all():
                wrong.append(f"layer {layer} {role.value} block {block}")
    return wrong


def naive_copy(
    spec: CacheSpec,
    memory: dict[tuple[int, Role], Bytes],
    host: Bytes,
    direction: Direction,
    device_ids: list[int],
    host_ids: list[int],
    layers: range,
) -> None:
    """What RecordCopier.copy means, one piece at a time."""
    for part in spec.record_parts:
        if part.layer not in layers:
            continue
        device = memory[(part.layer, part.role.role)]
        for i, j in zip(device_ids, host_ids, strict=True):
            record = host[j, part.offset : part.offset + part.nbytes]
            if direction is Direction.TO_HOST:
                record[:] = device[i]
            else:
                device[i] = record


class FaultyCopier:
    """A BlockCopier that does something at its Nth call (from 0): "fail", "scribble" (half a copy, then fail) or
    "stall" (until `resume` is set or stall_s is over). Counts calls; -1 does nothing. While `gate` is clear every call
    waits."""

    def __init__(self, inner: BlockCopier, at: int = -1, what: str = "fail", stall_s: float = 30.0) -> None:
        self.inner, self.at, self.what, self.stall_s = inner, at, what, stall_s
        self.calls = 0
        self.log: list[tuple[Direction, list[int], list[int], range]] = []
        self.resume = threading.Event()
        self.stalled = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def layer_bytes(self, layer: int) -> int:
        return self.inner.layer_bytes(layer)

    def prepare(self, num_blocks: int) -> None:
        self.inner.prepare(num_blocks)

    def close(self) -> None:
        self.inner.close()  # type: ignore[attr-defined]

    def copy(
        self,
        direction: Direction,
        device_ids: Any,
        host_ids: Any,
        layers: range,
        landed: Callable[[int], None] | None = None,
    ) -> None:
        """A load is a call for each layer, so that it can fail in its middle."""
        if landed is None:
            self._copy(direction, device_ids, host_ids, layers)
            return
        for layer in layers:
            self._copy(direction, device_ids, host_ids, range(layer, layer + 1))
            landed(layer + 1)

    def _copy(self, direction: Direction, device_ids: Any, host_ids: Any, layers: range) -> None:
        call, self.calls = self.calls, self.calls + 1
        assert self.gate.wait(30)
        self.log.append((direction, device_ids.tolist(), host_ids.tolist(), layers))
        if call == self.at:
            if self.what == "stall":
                self.stalled.set()
                self.resume.wait(self.stall_s)
            else:
                if self.what == "scribble":
                    self.inner.copy(direction, device_ids, np.roll(host_ids, 1), range(layers.start, layers.start + 1))
                raise OSError(f"copy {call} failed on purpose")
        self.inner.copy(direction, device_ids, host_ids, layers)


def faulty(at: int = -1, what: str = "fail") -> tuple[Callable[[BlockCopier], BlockCopier], list[FaultyCopier]]:
    """For CacheController(wrap_copier=...): the wrapper, and a list that will hold the copier it made."""
    made: list[FaultyCopier] = []

    def wrap(inner: BlockCopier) -> BlockCopier:
        made.append(FaultyCopier(inner, at, what))
        return made[0]

    return wrap, made
