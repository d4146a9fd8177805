"""Device caches in named shared memory, for v0 on a CPU: one process allocates them, others attach.

Used by RunnerCache (share_as, attach). The memory is one file below /dev/shm: a page that says what it holds, then each
group, layer and role on pages of its own, at places that follow from the CacheSpec. Always holds: a process attaches
only while the owner lives, and only if its own config gives exactly what the page says: quantisation type, scales and
dtypes included, because several types share a shape. A name that a killed owner left behind is free: the next owner
makes new memory, and who is still attached to the old keeps that.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastkv.core.spec import CacheSpec, LayerGroup, RoleSpec
from fastkv.errors import ConfigError
from fastkv.storage.namespace import digest_scales
from fastkv.worker.static_scales import LayerScales, named_arrays
from fastkv.worker.tensors import ByteArray, CacheTensors, check_fits, device_capacity_bytes, tensor_over

SHARED_MEMORY = Path("/dev/shm")
_PAGE_BYTES = 1 << 20  # some 60 bytes a tensor
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
        scales: static scales that the caches are read and written with, or None.
        owner: make the memory; otherwise attach to it.

    Raises:
        ConfigError: a bad name or no blocks; as owner: another process owns the name, or there is no memory; otherwise:
            nobody owns it, it is not ready yet, or its owner's caches are not these.
    """

    def __init__(self, name: str, spec: CacheSpec, num_blocks: int, scales: LayerScales | None, *, owner: bool) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"shared cache name {name!r} is no file name; use letters, digits, '.', '-' and '_'")
        if num_blocks < 1:
            raise ConfigError(f"a cache needs at least 1 block, got {num_blocks}")
        self.path = SHARED_MEMORY / f"fastkv-{name}"
        self._places = list(_places(spec, num_blocks))
        content = _describe(spec, scales) | {"tensors": [place.describe() for place in self._places]}
        page = json.dumps(content).encode().ljust(_PAGE_BYTES)
        if len(page) > _PAGE_BYTES:
            raise ConfigError(f"{len(self._places)} cache tensors are too many to share under one name")
        fd = self._create(page) if owner else self._open(page)
        try:
            self._map = mmap.mmap(fd, 0)
        except OSError as error:
            if owner:
                _give_up(self.path, fd, os.getpid())
            else:
                os.close(fd)
            raise ConfigError(f"cannot map the shared caches at {self.path}: {error}") from error
        self._give_up = weakref.finalize(self, _give_up, self.path, fd, os.getpid()) if owner else None
        if not owner:
            os.close(fd)

    def tensors(self, group: str) -> CacheTensors:
        """(layer, role) -> tensor of one group, [num_blocks, *block_shape], a view of the memory."""
        return {
            (place.layer, place.role.role): tensor_over(self._bytes(place), place.role, place.shape)
            for place in self._places
            if place.group.name == group
        }

    def close(self) -> None:
        """As owner, give up the name: nobody can attach any more. Also when the owner ends. Legal twice."""
        if self._give_up is not None:
            self._give_up()

    def _bytes(self, place: _Place) -> ByteArray:
        return np.frombuffer(self._map, dtype=np.uint8, count=place.nbytes, offset=place.offset)

    def _create(self, page: bytes) -> int:
        nbytes, remedy = self._places[-1].offset + self._places[-1].nbytes, "lower cache.device_memory"
        check_fits(nbytes, device_capacity_bytes("cpu"), f"shared caches at {self.path}", remedy)
        fd = self._own()
        try:
            os.posix_fallocate(fd, 0, nbytes)
            os.pwrite(fd, page, 0)  # last: until then nobody can attach
        except OSError as error:
            _give_up(self.path, fd, os.getpid())
            raise ConfigError(
                f"cannot make shared caches of {nbytes} bytes at {self.path}: {error}; {remedy}"
            ) from error
        return fd

    def _own(self) -> int:
        """A new file of this name, with the lock that says who owns it."""
        while True:
            self._clear_name()
            try:
                fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                continue  # somebody was faster
            except OSError as error:
                raise ConfigError(f"cannot make shared caches at {self.path}: {error}") from error
            if _lock(fd, fcntl.LOCK_EX) and os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # taken for one that was left behind, before it was locked

    def _clear_name(self) -> None:
        """Remove the file that a killed owner left."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"cannot make shared caches at {self.path}: {error}") from error
        try:
            if not _lock(fd, fcntl.LOCK_EX):
                raise ConfigError(
                    f"another process owns the shared caches at {self.path}; choose another name, or attach to them"
                )
            if os.fstat(fd).st_nlink:
                self.path.unlink()
        finally:
            os.close(fd)

    def _open(self, page: bytes) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"no shared caches at {self.path} ({error}); start their owner first") from error
        try:
            if _lock(fd, fcntl.LOCK_SH):
                raise ConfigError(f"the owner of the shared caches at {self.path} is gone; start it again")
            _compare(_read(os.pread(fd, _PAGE_BYTES, 0), self.path), json.loads(page), self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _read(page: bytes, path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(page)
    except ValueError:
        raise ConfigError(f"the shared caches at {path} are not ready; attach when their owner has started") from None
    return content


def _lock(fd: int, kind: int) -> bool:
    """Take a lock until the file is closed; False if another process has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _give_up(path: Path, fd: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a child that was forked
        path.unlink(missing_ok=True)
        os.close(fd)


def _describe(spec: CacheSpec, scales: LayerScales | None) -> dict[str, object]:
    """What the bytes mean, besides their dtypes and shapes."""
    arrays = named_arrays(scales)
    return {
        "kv_cache_quant_type": spec.storage.name,
        "scale granularity": spec.scale_granularity.value if spec.scale_granularity else None,
        "model dtype": spec.model_dtype,
        "static scales": digest_scales(arrays) if arrays else None,
        "block size": spec.block_size,
        "tensor parallel size": spec.tp_size,
    }


def _compare(there: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    for what, wanted in here.items():
        given = there.get(what)
        if what == "tensors":
            pairs = [(a, b) for a, b in zip(given or (), wanted, strict=False) if a != b]
            given, wanted = pairs[0] if pairs else (len(given or ()), len(wanted))
            what = "(group, layer, role, dtype, shape, offset)" if pairs else "number of tensors"
        if given != wanted:
            raise ConfigError(
                f"the shared caches at {path} have {what} {given} where this config has {wanted}; give both processes "
                "the same config"
            )


def _places(spec: CacheSpec, num_blocks: int) -> Iterator[_Place]:
    offset = _PAGE_BYTES
    for group in spec.groups:
        for layer in group.layers:
            for role in group.roles:
                blocks = group.num_blocks(num_blocks)
                nbytes = blocks * role.block_bytes
                yield _Place(group, layer, role, tuple(role.shape(blocks)), offset, nbytes)
                offset += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
