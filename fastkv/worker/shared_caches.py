"""Device caches in named shared memory, for v0 on a CPU: one process allocates them, others attach.

Used by RunnerCache (share_as, attach). The memory is one file below /dev/shm: a page that says what lies where, then
each group, layer and role on pages of its own, at places that follow from the CacheSpec. Always holds: a process
attaches only while the owner lives, and only if its own spec gives exactly what the page says, dtypes included; what a
killed owner left behind is taken over by the next one of that name.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastkv.core.spec import CacheSpec, LayerGroup, RoleSpec
from fastkv.errors import ConfigError
from fastkv.worker.tensors import ByteArray, CacheTensors, check_fits, device_capacity_bytes, tensor_over

SHARED_MEMORY = Path("/dev/shm")
_HEADER_BYTES = 1 << 20  # some 60 bytes a tensor
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one role of one layer lies."""

    group: LayerGroup
    layer: int
    role: RoleSpec
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def describe(self) -> list[object]:
        return [self.group.name, self.layer, self.role.role.value, self.role.dtype, list(self.shape), self.offset]


class SharedCaches:
    """The memory, mapped into this process until the last tensor over it goes.

    Args:
        name: of the memory; letters, digits, dots, dashes, underscores.
        spec: what a block is.
        num_blocks: blocks of the pool.
        owner: make the memory; otherwise attach to it.

    Raises:
        ConfigError: a bad name; as owner: another process owns the name, or there is no memory; otherwise: nobody owns
            it, or its owner's caches are not these.
    """

    def __init__(self, name: str, spec: CacheSpec, num_blocks: int, *, owner: bool) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"shared cache name {name!r} is no file name; use letters, digits, '.', '-' and '_'")
        self.path = SHARED_MEMORY / f"fastkv-{name}"
        self._places = list(_places(spec, num_blocks))
        header = json.dumps([place.describe() for place in self._places]).encode().ljust(_HEADER_BYTES)
        if len(header) > _HEADER_BYTES:
            raise ConfigError(f"{len(self._places)} cache tensors are too many to share under one name")
        self._fd = self._create(header) if owner else self._open(header)
        self._owner = owner
        self._map = mmap.mmap(self._fd, 0)
        if not owner:
            os.close(self._fd)

    def tensors(self, group: str) -> CacheTensors:
        """(layer, role) -> tensor of one group, [num_blocks, *block_shape], a view of the memory."""
        return {
            (place.layer, place.role.role): tensor_over(self._bytes(place), place.role, place.shape)
            for place in self._places
            if place.group.name == group
        }

    def close(self) -> None:
        """As owner, give up the name: nobody can attach any more. Legal twice."""
        if self._owner:
            self._owner = False
            self.path.unlink()
            os.close(self._fd)

    def _bytes(self, place: _Place) -> ByteArray:
        return np.frombuffer(self._map, dtype=np.uint8, count=place.nbytes, offset=place.offset)

    def _create(self, header: bytes) -> int:
        nbytes, remedy = self._places[-1].offset + self._places[-1].nbytes, "lower cache.device_memory"
        check_fits(nbytes, device_capacity_bytes("cpu"), f"shared caches at {self.path}", remedy)
        fd = self._own()
        try:
            os.ftruncate(fd, 0)  # what a killed owner left
            os.posix_fallocate(fd, 0, nbytes)
            os.pwrite(fd, header, 0)
        except OSError as error:
            self.path.unlink()
            os.close(fd)
            raise ConfigError(
                f"cannot make shared caches of {nbytes} bytes at {self.path}: {error}; {remedy}"
            ) from error
        return fd

    def _own(self) -> int:
        """The file, new or left behind, with the lock that says who owns it."""
        while True:
            fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise ConfigError(
                    f"another process owns the shared caches at {self.path}; choose another name, or attach to them"
                ) from None
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # its owner gave it up between the two calls

    def _open(self, header: bytes) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"no shared caches at {self.path} ({error}); start their owner first") from error
        try:
            if not _is_locked(fd):
                raise ConfigError(f"the owner of the shared caches at {self.path} is gone; start it again")
            _compare(json.loads(os.pread(fd, _HEADER_BYTES, 0)), json.loads(header), self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _compare(there: list[object], here: list[object], path: Path) -> None:
    differing = next(((a, b) for a, b in zip(there, here, strict=False) if a != b), None)
    if differing is not None:
        raise ConfigError(
            f"the shared caches at {path} hold (group, layer, role, dtype, shape, offset) {differing[0]} where this "
            f"config needs {differing[1]}; give both processes the same config"
        )
    if len(there) != len(here):
        raise ConfigError(
            f"the shared caches at {path} are {len(there)} tensors, this config needs {len(here)}; give both processes "
            "the same config"
        )


def _places(spec: CacheSpec, num_blocks: int) -> Iterator[_Place]:
    offset = _HEADER_BYTES
    for group in spec.groups:
        for layer in group.layers:
            for role in group.roles:
                blocks = group.num_blocks(num_blocks)
                nbytes = blocks * role.block_bytes
                yield _Place(group, layer, role, tuple(role.shape(blocks)), offset, nbytes)
                offset += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
