"""The reading sides of the `file` backend: FileLookup for the scheduler, FileReader for ranks that do not write.

Neither takes a lock: they follow the writers' indexes (follower.py) and may run in any process, before the writer
starts and after it died. What they see may lag; a record that was evicted meanwhile is a miss, because the checksum in
the entry decides over the payload that was read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fastkv.storage.base import (
    Buffer,
    Counters,
    GetOutcome,
    PutOutcome,
    RemoveOutcome,
    check_batch,
    check_digests,
    seconds_left,
)
from fastkv.storage.fileops import FileOps
from fastkv.storage.folder import StoreFolder
from fastkv.storage.follower import IndexFollower
from fastkv.storage.format import Record, payload_checksum
from fastkv.storage.namespace import StorageNamespace
from fastkv.storage.segment import SegmentFiles


class FileLookup:
    """Which blocks every rank has stored. See StorageLookup."""

    def __init__(self, path: Path, namespace: StorageNamespace, ops: FileOps | None = None) -> None:
        """Follow all writing ranks of a namespace. The store, or a rank's part of it, may come into being later.

        Args:
            path: the store's folder.
            namespace: whose records.
            ops: the system calls; another one in tests.
        """
        folder, ops = StoreFolder(path, 0.0), ops or FileOps()
        digest = namespace.digest
        self._ranks = [
            IndexFollower(folder.rank_path(digest, rank), digest, rank, ops) for rank in range(namespace.num_writers)
        ]
        self._counters = Counters()
        self._lock = threading.Lock()
        self._closed = False

    def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
        """How many leading blocks exist for every rank. A rank that cannot be read has nothing."""
        check_digests(digests)
        if not self._lock.acquire(timeout=seconds_left(deadline_s)):
            self._counters.add("lookup_timeout")
            return 0
        try:
            leading = 0 if self._closed else len(digests)
            for follower in self._ranks:
                if leading == 0:
                    break
                leading = self._leading(follower, digests[:leading], deadline_s)
        finally:
            self._lock.release()
        self._counters.add("lookup_blocks", leading)
        self._counters.add("lookups")
        return leading

    def counters(self) -> dict[str, int]:
        """lookups, lookup_blocks (found), lookup_timeout, io_errors."""
        return self._counters.snapshot()

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        return self._counters.last_error

    def close(self) -> None:
        """Close the indexes."""
        with self._lock:
            self._closed = True
            for follower in self._ranks:
                follower.close()

    def _leading(self, follower: IndexFollower, digests: Sequence[bytes], deadline_s: float) -> int:
        if time.monotonic() >= deadline_s:
            self._counters.add("lookup_timeout")
            return 0
        try:
            follower.refresh(deadline_s)
        except OSError as error:
            self._counters.fault("io_errors", error)
            return 0
        return next((row for row, digest in enumerate(digests) if follower.find(digest) is None), len(digests))


class FileReader:
    """Connector of a rank that holds the same bytes as the writing rank: reads its records, stores nothing."""

    def __init__(self, path: Path, namespace: StorageNamespace, rank: int, ops: FileOps | None = None) -> None:
        """Follow the rank that writes for this one.

        Raises:
            ConfigError: no such rank.
        """
        writer = namespace.writer_rank(rank)
        self._folder = StoreFolder(path, 0.0).rank_path(namespace.digest, writer)
        self._ops = ops or FileOps()
        self._follower = IndexFollower(self._folder, namespace.digest, writer, self._ops)
        self._record_bytes = namespace.record_bytes
        self._counters = Counters()
        self._segments: SegmentFiles | None = None
        self._generation = -1
        self._seed = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def record_bytes(self) -> int:
        """Largest record there can be."""
        return self._record_bytes

    def put(self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float) -> tuple[PutOutcome, ...]:
        """Leave it to the writing rank."""
        check_batch(digests, buffers, self._record_bytes, writable=False)
        outcome = PutOutcome.UNAVAILABLE if self._closed else PutOutcome.DELEGATED
        outcomes = (outcome,) * len(digests)
        self._counters.add_outcomes("put", outcomes)
        return outcomes

    def get_into(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float
    ) -> tuple[GetOutcome, ...]:
        """Read records that the other rank stored."""
        views = check_batch(digests, buffers, self._record_bytes, writable=True)
        if not self._lock.acquire(timeout=seconds_left(deadline_s)):
            outcomes: tuple[GetOutcome, ...] = (GetOutcome.TIMEOUT,) * len(digests)
        else:
            try:
                outcomes = self._get_all(digests, views, deadline_s)
            finally:
                self._lock.release()
        self._counters.add_outcomes("get", outcomes)
        return outcomes

    def remove(self, digests: Sequence[bytes]) -> tuple[RemoveOutcome, ...]:
        """Leave it to the writing rank."""
        check_digests(digests)
        return (RemoveOutcome.UNAVAILABLE if self._closed else RemoveOutcome.DELEGATED,) * len(digests)

    def flush(self) -> bool:
        """Nothing to do."""
        return not self._closed

    def counters(self) -> dict[str, int]:
        """get_*, put_* by outcome; io_errors, checksum_errors, length_mismatch."""
        return self._counters.snapshot()

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        return self._counters.last_error

    def close(self) -> None:
        """Close the files, after calls in progress."""
        with self._lock:
            self._closed = True
            self._drop_segments()
            self._follower.close()

    def _get_all(self, digests: Sequence[bytes], views: list[memoryview], deadline_s: float) -> tuple[GetOutcome, ...]:
        if self._closed:
            return (GetOutcome.UNAVAILABLE,) * len(digests)
        try:
            self._refresh(deadline_s)
        except OSError as error:
            self._counters.fault("io_errors", error)
            return (GetOutcome.FAILED,) * len(digests)
        return tuple(self._get(digest, view, deadline_s) for digest, view in zip(digests, views, strict=True))

    def _get(self, digest: bytes, view: memoryview, deadline_s: float) -> GetOutcome:
        if time.monotonic() >= deadline_s:
            return GetOutcome.TIMEOUT
        record = self._follower.find(digest)
        if record is None:
            return GetOutcome.MISS
        if record.length != len(view):
            self._counters.add("length_mismatch")
            return GetOutcome.MISS
        try:
            if self._read(record, view):
                return GetOutcome.HIT
            self._refresh(deadline_s)
        except FileNotFoundError:
            return GetOutcome.MISS  # the writer, opened anew, gave the segment back
        except OSError as error:
            self._counters.fault("io_errors", error)
            return GetOutcome.FAILED
        if self._follower.find(digest) is not record:
            return GetOutcome.MISS  # evicted while it was read
        self._counters.fault("checksum_errors", f"{self._folder} slot {record.slot}")
        return GetOutcome.CORRUPT

    def _read(self, record: Record, view: memoryview) -> bool:
        assert self._follower.identity is not None  # it has records
        if self._segments is None:
            self._segments = SegmentFiles(self._folder, self._follower.identity, self._ops, writable=False)
        self._segments.read_into(record.slot, view)
        return payload_checksum(view, self._seed) == record.payload_sum

    def _refresh(self, deadline_s: float) -> None:
        self._follower.refresh(deadline_s)
        if self._follower.generation != self._generation:
            self._drop_segments()
            self._generation = self._follower.generation
        if self._follower.identity is not None:
            self._seed = self._follower.identity.seed

    def _drop_segments(self) -> None:
        if self._segments is not None:
            self._segments.close()
            self._segments = None
