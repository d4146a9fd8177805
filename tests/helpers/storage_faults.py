"""Storage that misbehaves on purpose: system calls and connectors that fail, stall or corrupt at the Nth call.

`FaultyOps` sits below the file backend, `FaultyConnector` above any backend. Both count their calls, so that a test can
repeat one scenario with the fault at call 0, 1, 2, ... until the scenario ends before the fault comes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pytest

from fastkv.storage.base import (
    Buffer,
    Counters,
    GetOutcome,
    PutOutcome,
    RemoveOutcome,
    StorageConnector,
    check_batch,
)
from fastkv.storage.fileops import FileOps

Result = TypeVar("Result")


class Fault(str, Enum):
    """What goes wrong."""

    FAIL = "fail"  # the call reports an I/O error
    FULL = "full"  # the call reports that there is no room
    RAISE = "raise"  # the call raises what nobody expects (connectors only)
    STALL = "stall"  # the call takes stall_s longer
    CORRUPT = "corrupt"  # the call seems to work, but the bytes are wrong


def replace_call(monkeypatch: pytest.MonkeyPatch, name: str, replacement: Callable[..., Any], module: Any = os) -> None:
    """Put a replacement in the place of a system call of os (or of io), for pathlib too."""
    monkeypatch.setattr(module, name, replacement)
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10: it has taken its calls when it was imported
    if hasattr(accessor, name):
        monkeypatch.setattr(accessor, name, staticmethod(replacement))


def make_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole file system, for this process: what would change it through os, pathlib or shutil is refused."""

    def refuse(*args: object, **options: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    open_fd, open_file = os.open, io.open

    def open_fd_to_read(path: Any, flags: int, *args: Any, **options: Any) -> int:
        return refuse() if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT) else open_fd(path, flags, *args, **options)

    def open_file_to_read(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        return refuse() if set(mode) & set("wax+") else open_file(file, mode, *args, **options)

    monkeypatch.setattr(os, "open", open_fd_to_read)
    monkeypatch.setattr(builtins, "open", open_file_to_read)
    replace_call(monkeypatch, "open", open_file_to_read, io)
    for name in ("chmod", "link", "mkdir", "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink"):
        replace_call(monkeypatch, name, refuse)
    monkeypatch.setattr(os, "utime", refuse)


class _Trigger:
    """Decides for each call whether the fault comes now."""

    def __init__(self, fault: Fault, at_call: int, num_calls: int, stall_s: float) -> None:
        self.fault, self.stall_s = fault, stall_s
        self._faulty = range(at_call, at_call + num_calls)
        self.num_calls = 0
        self._lock = threading.Lock()

    def next(self) -> Fault | None:
        with self._lock:
            call = self.num_calls
            self.num_calls += 1
        if call not in self._faulty:
            return None
        if self.fault is Fault.STALL:
            time.sleep(self.stall_s)
            return None
        return self.fault

    @property
    def has_come(self) -> bool:
        return self.num_calls > self._faulty.start


class FaultyOps(FileOps):
    """System calls of which some fail. Closing never does: POSIX has freed the descriptor even then."""

    def __init__(self, fault: Fault, at_call: int, num_calls: int = 1, stall_s: float = 0.02) -> None:
        self.trigger = _Trigger(fault, at_call, num_calls, stall_s)

    def _next(self) -> bool:
        """Whether the bytes of this call are to be corrupted."""
        fault = self.trigger.next()
        if fault in (Fault.FAIL, Fault.FULL):
            raise OSError(errno.EIO if fault is Fault.FAIL else errno.ENOSPC, f"injected {fault.value}")
        return fault is Fault.CORRUPT

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> int:
        self._next()
        return super().open(path, create=create, writable=writable)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._next()
        super().allocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._next()
        super().truncate(fd, nbytes)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        super().write(fd, _flipped(data) if self._next() else data, offset)

    def read_into(self, fd: int, view: memoryview, offset: int) -> None:
        is_corrupt = self._next()
        super().read_into(fd, view, offset)
        if is_corrupt:
            view[:] = _flipped(view)

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        is_corrupt = self._next()
        data = super().read(fd, nbytes, offset)
        return _flipped(data) if is_corrupt else data

    def sync(self, fd: int) -> None:
        self._next()
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._next()
        super().sync_folder(path)

    def unlink(self, path: Path) -> None:
        self._next()
        super().unlink(path)


def _flipped(data: memoryview | bytes) -> bytes:
    """The data with a bit of every 61st byte flipped: shorter than any checksummed unit is long."""
    array = np.frombuffer(data, np.uint8).copy()
    array[::61] ^= 0x10
    return array.tobytes()


class MemoryConnector:
    """The simplest connector: a dict. `gate` lets a test hold every call until it is set."""

    def __init__(self, record_bytes: int, capacity: int = 1 << 30) -> None:
        self._record_bytes, self._capacity = record_bytes, capacity
        self._counters = Counters()
        self.records: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    @property
    def record_bytes(self) -> int:
        return self._record_bytes

    def put(self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float) -> tuple[PutOutcome, ...]:
        views = check_batch(digests, buffers, self._record_bytes, writable=False)
        self._enter("put")
        outcomes = []
        for digest, view in zip(digests, views, strict=True):
            if digest in self.records:
                outcomes.append(PutOutcome.EXISTS)
            elif len(self.records) >= self._capacity:
                outcomes.append(PutOutcome.FULL)
            else:
                self.records[digest] = bytes(view)
                outcomes.append(PutOutcome.STORED)
        self._counters.add_outcomes("put", outcomes)
        return tuple(outcomes)

    def get_into(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float
    ) -> tuple[GetOutcome, ...]:
        views = check_batch(digests, buffers, self._record_bytes, writable=True)
        self._enter("get")
        outcomes = []
        for digest, view in zip(digests, views, strict=True):
            if digest in self.records:
                view[:] = self.records[digest]
            outcomes.append(GetOutcome.HIT if digest in self.records else GetOutcome.MISS)
        self._counters.add_outcomes("get", outcomes)
        return tuple(outcomes)

    def remove(self, digests: Sequence[bytes]) -> tuple[RemoveOutcome, ...]:
        self._enter("remove")
        gone = [self.records.pop(digest, None) is not None for digest in digests]
        return tuple(RemoveOutcome.REMOVED if known else RemoveOutcome.MISSING for known in gone)

    def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
        self._enter("contains")
        return next((row for row, digest in enumerate(digests) if digest not in self.records), len(digests))

    def flush(self) -> bool:
        self._enter("flush")
        return True

    def counters(self) -> dict[str, int]:
        return self._counters.snapshot()

    def last_error(self) -> str:
        return self._counters.last_error

    def close(self) -> None:
        self.is_closed = True

    def _enter(self, call: str) -> None:
        self.gate.wait(30)


class FaultyConnector:
    """A connector of which some calls (put, get_into, remove, flush) go wrong.

    CORRUPT fills the buffers of a get with garbage and reports CORRUPT, as a backend does that checks its bytes; a
    corrupt put reports success, and later gets of it find garbage.
    """

    def __init__(
        self, inner: StorageConnector, fault: Fault, at_call: int, num_calls: int = 1, stall_s: float = 0.05
    ) -> None:
        self.inner = inner
        self.trigger = _Trigger(fault, at_call, num_calls, stall_s)
        self._counters = Counters()
        self._garbage: set[bytes] = set()

    @property
    def record_bytes(self) -> int:
        return self.inner.record_bytes

    def put(self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float) -> tuple[PutOutcome, ...]:
        fault = self._next("put")
        if fault in (Fault.FAIL, Fault.FULL):
            return ((PutOutcome.FAILED if fault is Fault.FAIL else PutOutcome.FULL),) * len(digests)
        if fault is Fault.CORRUPT:
            self._garbage |= set(digests)
        return self._timed(
            PutOutcome.TIMEOUT, deadline_s, digests, lambda: self.inner.put(digests, buffers, deadline_s)
        )

    def get_into(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float
    ) -> tuple[GetOutcome, ...]:
        fault = self._next("get")
        if fault in (Fault.FAIL, Fault.FULL):
            return (GetOutcome.FAILED,) * len(digests)
        outcomes = self._timed(
            GetOutcome.TIMEOUT, deadline_s, digests, lambda: self.inner.get_into(digests, buffers, deadline_s)
        )
        corrupt = set(digests) if fault is Fault.CORRUPT else self._garbage
        checked = []
        for digest, buffer, outcome in zip(digests, buffers, outcomes, strict=True):
            if digest in corrupt and outcome is GetOutcome.HIT:
                memoryview(buffer).cast("B")[:] = b"\xee" * memoryview(buffer).nbytes
                outcome = GetOutcome.CORRUPT
            checked.append(outcome)
        return tuple(checked)

    def remove(self, digests: Sequence[bytes]) -> tuple[RemoveOutcome, ...]:
        if self._next("remove") is not None:
            return (RemoveOutcome.FAILED,) * len(digests)
        self._garbage -= set(digests)
        return self.inner.remove(digests)

    def flush(self) -> bool:
        return self._next("flush") is None and self.inner.flush()

    def counters(self) -> dict[str, int]:
        return {**self.inner.counters(), **self._counters.snapshot()}

    def last_error(self) -> str:
        return self._counters.last_error or self.inner.last_error()

    def close(self) -> None:
        self.inner.close()

    def _next(self, verb: str) -> Fault | None:
        fault = self.trigger.next()
        if fault is not None:
            self._counters.fault(f"injected_{fault.value}", verb)
        if fault is Fault.RAISE:
            raise RuntimeError(f"injected into {verb}")
        return fault

    @staticmethod
    def _timed(
        timeout: Result, deadline_s: float, digests: Sequence[bytes], call: Callable[[], tuple[Result, ...]]
    ) -> tuple[Result, ...]:
        return (timeout,) * len(digests) if time.monotonic() >= deadline_s else call()
