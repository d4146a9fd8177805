"""What every storage backend is: two Protocols, the outcomes they report, and their counters.

The lookup half goes to the scheduler, the connector half to each worker rank. They never meet in memory: what one
stored, the other finds through the backend. A backend is a cache, so its faults are never exceptions on the request
path. Every record of a batch gets an outcome, everything that went wrong is counted, and the last error's text is kept.

What always holds:
- A buffer holds a record's bytes only where its outcome is HIT. After anything else its content is undefined.
- STORED means acknowledged: what that survives is the backend's `Durability`.
- Batches are in token order, ancestors first. Backends rely on it to age a chain's tail before its head.
- Deadlines are absolute instants of time.monotonic(), so that they survive being passed on; `deadline_in` makes one.

Digests are the 32 bytes of fastkv.core.digest. Buffers are C-contiguous host records; they are read and written in
place, never copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastkv.errors import InvariantError

DIGEST_BYTES = 32
NO_DEADLINE = float("inf")

Buffer = memoryview | bytearray | npt.NDArray[np.uint8]


class PutOutcome(str, Enum):
    """What became of one record of a put."""

    STORED = "stored"  # written and acknowledged by this call
    EXISTS = "exists"  # acknowledged by an earlier call
    DELEGATED = "delegated"  # ranks hold the same bytes and another one stores them
    FULL = "full"  # no room: limit or disk
    FAILED = "failed"  # the backend reported an error
    TIMEOUT = "timeout"  # the deadline passed
    DROPPED = "dropped"  # never tried: the queue was full or was abandoned at close
    UNAVAILABLE = "unavailable"  # never tried: closed, or the circuit breaker is open

    @property
    def is_stored(self) -> bool:
        """Whether the record is in storage, as far as this rank is concerned."""
        return self in (PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.DELEGATED)


class GetOutcome(str, Enum):
    """What became of one record of a get."""

    HIT = "hit"  # the buffer holds exactly the stored bytes
    MISS = "miss"  # not there
    CORRUPT = "corrupt"  # there, but not the bytes that were stored; counts as a miss
    FAILED = "failed"  # the backend reported an error
    TIMEOUT = "timeout"  # the deadline passed
    DROPPED = "dropped"  # never tried: the queue was full or was abandoned at close
    UNAVAILABLE = "unavailable"  # never tried: closed, or the circuit breaker is open

    @property
    def is_hit(self) -> bool:
        """Whether the buffer may be read."""
        return self is GetOutcome.HIT


class RemoveOutcome(str, Enum):
    """What became of one record of a remove."""

    REMOVED = "removed"
    MISSING = "missing"
    DELEGATED = "delegated"  # only the rank that stores shared records removes them
    FAILED = "failed"  # the backend reported an error
    UNAVAILABLE = "unavailable"  # closed


class Durability(str, Enum):
    """What an acknowledged put survives. `flush` is the stronger point for both."""

    PROCESS = "process"  # SIGKILL of the process at any moment; not a power loss
    DISK = "disk"  # power loss too: synced before it is acknowledged


class StorageLookup(Protocol):
    """Scheduler half: which blocks exist for all ranks."""

    def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
        """How many leading blocks exist for every rank.

        Stops at the first block that some rank lacks, and at the deadline. A hint: a record may be evicted before it
        is read, and the read is then a miss. Never raises for a fault of the backend.

        Args:
            digests: prefix digests in token order.
            deadline_s: absolute, on time.monotonic().
        """
        ...

    def counters(self) -> dict[str, int]:
        """Events so far, by name."""
        ...

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        ...

    def close(self) -> None:
        """Give everything back. Later calls of contains answer 0."""
        ...


class StorageConnector(Protocol):
    """Worker half, one rank: moves host records. Usable from several threads."""

    @property
    def record_bytes(self) -> int:
        """Largest record that is accepted."""
        ...

    def put(self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float) -> tuple[PutOutcome, ...]:
        """Store records; an outcome for each.

        Args:
            digests: prefix digests in token order.
            buffers: one C-contiguous uint8 buffer a record; not to be written to until this returns.
            deadline_s: absolute, on time.monotonic(); checked between records.

        Raises:
            InvariantError: the arguments do not fit together (the caller's bug). Never for a fault of the backend.
        """
        ...

    def get_into(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float
    ) -> tuple[GetOutcome, ...]:
        """Read records into writable buffers of exactly the stored length; an outcome for each. Raises as `put`."""
        ...

    def remove(self, digests: Sequence[bytes]) -> tuple[RemoveOutcome, ...]:
        """Forget records; an outcome for each."""
        ...

    def flush(self) -> bool:
        """Make everything acknowledged survive a power loss. False (and a counter) if the backend could not."""
        ...

    def counters(self) -> dict[str, int]:
        """Events so far, by name."""
        ...

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        ...

    def close(self) -> None:
        """Give everything back. Later calls report UNAVAILABLE."""
        ...


class Counters:
    """Named event counts and the last fault's text, shared by the threads of one backend."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._last_error = ""

    def add(self, name: str, count: int = 1) -> None:
        """Count events."""
        if count:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + count

    def add_outcomes(self, verb: str, outcomes: Sequence[Enum]) -> None:
        """Count each outcome of a batch as "<verb>_<outcome>"."""
        with self._lock:
            for kind in type(outcomes[0]) if outcomes else ():
                if count := outcomes.count(kind):
                    name = f"{verb}_{kind.value}"
                    self._counts[name] = self._counts.get(name, 0) + count

    def fault(self, name: str, error: BaseException | str) -> None:
        """Count a fault and keep its text."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + 1
            self._last_error = f"{name}: {error}"

    def snapshot(self) -> dict[str, int]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._counts)

    @property
    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        with self._lock:
            return self._last_error


def deadline_in(timeout_s: float) -> float:
    """The deadline timeout_s seconds from now."""
    return time.monotonic() + timeout_s


def seconds_left(deadline_s: float) -> float:
    """Seconds until a deadline, as a timeout that threading accepts: never negative, never infinite."""
    return min(max(deadline_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)


def check_digests(digests: Sequence[bytes]) -> None:
    """Refuse anything that is no prefix digest.

    Raises:
        InvariantError: a digest is not 32 bytes.
    """
    for digest in digests:
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            raise InvariantError(f"a storage digest is {DIGEST_BYTES} bytes, got {digest!r}")


def check_batch(
    digests: Sequence[bytes], buffers: Sequence[Buffer], record_bytes: int, *, writable: bool
) -> list[memoryview]:
    """The buffers as flat byte views, after checking that the batch makes sense.

    Raises:
        InvariantError: lengths differ, a digest is not 32 bytes, a buffer is strided, empty, larger than record_bytes,
            or read-only where it must be written to.
    """
    check_digests(digests)
    if len(digests) != len(buffers):
        raise InvariantError(f"{len(digests)} digests with {len(buffers)} buffers; give one buffer a digest")
    views = []
    for buffer in buffers:
        data: Any = buffer
        view = memoryview(data)
        if not view.c_contiguous:
            raise InvariantError(
                "a record's buffer must be C-contiguous; a copy would be needed, give the record itself"
            )
        if not 0 < view.nbytes <= record_bytes:
            raise InvariantError(f"a record of {view.nbytes} bytes; this store takes 1 to {record_bytes} bytes")
        if writable and view.readonly:
            raise InvariantError("a record is read into a buffer that is read-only")
        views.append(view.cast("B"))
    return views
