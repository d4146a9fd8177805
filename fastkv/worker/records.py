"""RecordCopier: moves blocks between the device's tensors and host records, for every group, layer and role.

Owns the table of where each role lies (from CacheSpec.record_parts and the tensors' addresses) and the native copy
threads. Called by the CopyEngine's thread; the GIL is released while bytes move. Knows bytes, no dtypes: nothing that
the spec lists can be left out, because the table is made from the spec alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import paddle

from fastkv.core.spec import CacheSpec, Role
from fastkv.core.transfers import Ids
from fastkv.errors import ConfigError, InvariantError, TransferError
from fastkv.ops._load import load_ops
from fastkv.worker.tensors import ByteArray

_MESSAGE_BYTES = 512
_GROUP_BYTES = 4 << 20  # layers smaller than this land together: 0.4 ms, beside some 30 us to tell a waiting step
_PREPARED_BYTES = 4 << 20  # copies that are worth waking a thread in advance
_LANDED = ctypes.CFUNCTYPE(None, ctypes.c_int64)

Landed = Callable[[int], None]


class Direction(IntEnum):
    """Which way bytes go."""

    TO_HOST = 0
    TO_DEVICE = 1


class BlockCopier(Protocol):
    """What the CopyEngine copies with. Tests put one in that fails, stalls or corrupts."""

    @property
    def num_layers(self) -> int:
        """Layers of a record, MTP's included."""
        ...

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one block in one layer."""
        ...

    def prepare(self, num_blocks: int) -> None:
        """A copy of so many blocks is about to come."""
        ...

    def copy(
        self, direction: Direction, device_ids: Ids, host_ids: Ids, layers: range, landed: Landed | None = None
    ) -> None:
        """Copy the given layers of device_ids[i] <-> host_ids[i], for all i; returns when the bytes are there.

        Args:
            direction, device_ids, host_ids: what goes where.
            layers: consecutive layers.
            landed: called on this thread, with an ascending number, when the bytes of all layers below it are there.

        Raises:
            TransferError: an id out of range; nothing was copied.
        """
        ...


class RecordCopier:
    """The native BlockCopier, over memory in this process.

    Args:
        spec: lays out a record.
        tensors: (global layer id, role) -> device tensor, for everything in the spec, in CPU memory.
        num_device_blocks: blocks that may be named; groups may have more.
        host: uint8 [host blocks, record stride].
        threads: threads that copy, the caller included.

    Raises:
        ConfigError: a tensor that is not in CPU memory, or no memory for the threads.
        InvariantError: tensors or records that are not what the spec says.
    """

    def __init__(
        self,
        spec: CacheSpec,
        tensors: Mapping[tuple[int, Role], paddle.Tensor],
        num_device_blocks: int,
        host: ByteArray,
        threads: int = 2,
    ) -> None:
        if host.ndim != 2 or host.shape[1] != spec.record_stride_bytes or not host.flags.c_contiguous:
            raise InvariantError(f"host records of shape {host.shape}; the spec wants {spec.record_stride_bytes} bytes")
        self._table = _part_table(spec, tensors, num_device_blocks)
        self._first_part = _first_parts(spec)
        parts = zip(self._first_part, self._first_part[1:], strict=False)
        self._layer_bytes = [int(self._table[first:last, 2].sum()) for first, last in parts]
        self._num_device_blocks = num_device_blocks
        self._host, self._tensors = host, dict(tensors)  # keeps the memory alive
        self._library = _library()
        self._pool: int | None = self._library.fastkv_copy_pool_create(threads)
        if not self._pool:
            raise ConfigError(f"the system gives no {threads} copy threads; lower cache.copy_threads")

    @property
    def num_layers(self) -> int:
        """See BlockCopier."""
        return len(self._first_part) - 1

    def layer_bytes(self, layer: int) -> int:
        """See BlockCopier."""
        return self._layer_bytes[layer]

    def prepare(self, num_blocks: int) -> None:
        """See BlockCopier."""
        if self._pool is not None and num_blocks * sum(self._layer_bytes) >= _PREPARED_BYTES:
            self._library.fastkv_copy_pool_prepare(self._pool)

    def copy(
        self, direction: Direction, device_ids: Ids, host_ids: Ids, layers: range, landed: Landed | None = None
    ) -> None:
        """See BlockCopier."""
        device_ids, host_ids = (np.ascontiguousarray(ids, dtype=np.int32) for ids in (device_ids, host_ids))
        if len(device_ids) != len(host_ids):
            raise InvariantError(f"{len(device_ids)} device blocks and {len(host_ids)} host records in one copy")
        if self._pool is None:
            raise TransferError("the copier is closed")
        parts = self._table[self._first_part[layers.start] : self._first_part[layers.stop]]
        bounds = self._group_bounds(layers, len(device_ids)) if landed is not None else []
        first_part = (
            np.array([self._first_part[bound] for bound in bounds], dtype=np.int64) - self._first_part[layers.start]
        )

        errors: list[Exception] = []

        def tell(num_groups: int) -> None:
            assert landed is not None
            try:
                landed(bounds[num_groups])
            except Exception as error:  # ctypes would drop it; it is raised when the copy has ended
                errors.append(error)

        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        refused = self._library.fastkv_copy_records(
            self._pool,
            parts.ctypes.data,
            len(parts),
            self._num_device_blocks,
            self._host.ctypes.data,
            self._host.shape[1],
            self._host.shape[0],
            device_ids.ctypes.data,
            host_ids.ctypes.data,
            len(device_ids),
            int(direction),
            first_part.ctypes.data if bounds else None,
            max(0, len(bounds) - 1),
            _LANDED(tell) if bounds else _LANDED(),
            message,
            _MESSAGE_BYTES,
        )
        if refused:
            raise TransferError(message.value.decode())
        if errors:
            raise errors[0]

    def _group_bounds(self, layers: range, num_blocks: int) -> list[int]:
        """Where groups of layers that land together begin, and where the last one ends."""
        bounds, size = [layers.start], 0
        for layer in layers:
            size += self.layer_bytes(layer) * num_blocks
            if size >= _GROUP_BYTES or layer == layers[-1]:
                bounds.append(layer + 1)
                size = 0
        return bounds

    def close(self) -> None:
        """End the threads; no copy may be running. Legal twice."""
        if self._pool is not None:
            self._library.fastkv_copy_pool_destroy(self._pool)
            self._pool = None
            self._tensors.clear()


def _part_table(
    spec: CacheSpec, tensors: Mapping[tuple[int, Role], paddle.Tensor], num_device_blocks: int
) -> npt.NDArray[np.int64]:
    """int64 [parts, 4]: address of block 0, block stride, bytes, offset in a record. In record order."""
    rows = []
    for part in spec.record_parts:
        tensor = tensors.get((part.layer, part.role.role))
        where = f"{part.group} layer {part.layer} {part.role.role.value}"
        if tensor is None:
            raise InvariantError(f"{where} is not allocated, so blocks would be moved without it")
        if not tensor.place.is_cpu_place():
            raise ConfigError(f"{where} is on {tensor.place}; blocks are moved from and to CPU memory only")
        shape = tuple(tensor.shape)
        if shape[1:] != part.role.block_shape or shape[0] < num_device_blocks or not tensor.is_contiguous():
            raise InvariantError(f"{where} has shape {shape}; the spec wants {part.role.shape(num_device_blocks)}")
        rows.append((tensor.data_ptr(), part.nbytes, part.nbytes, part.offset))
    return np.array(rows, dtype=np.int64)


def _first_parts(spec: CacheSpec) -> list[int]:
    """Row of the part table where each layer starts, and the number of rows at the end."""
    layers = [part.layer for part in spec.record_parts]
    starts = [row for row, layer in enumerate(layers) if row == 0 or layers[row - 1] != layer]
    if [layers[row] for row in starts] != list(range(len(starts))):
        raise InvariantError(f"layer ids {layers} are not consecutive in a record")
    return [*starts, len(layers)]


def _library() -> Any:
    library = load_ops()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.fastkv_copy_pool_create.restype = pointer
    library.fastkv_copy_pool_create.argtypes = [ctypes.c_int]
    for consumer in (library.fastkv_copy_pool_destroy, library.fastkv_copy_pool_prepare):
        consumer.restype, consumer.argtypes = None, [pointer]
    signature: Iterable[Any] = (
        *(pointer, pointer, number, number),
        *(pointer, number, number),
        *(pointer, pointer, number, ctypes.c_int),
        *(pointer, number, _LANDED, ctypes.c_char_p, number),
    )
    library.fastkv_copy_records.restype = ctypes.c_int
    library.fastkv_copy_records.argtypes = list(signature)
    return library
