"""FileConnector: the `file` backend's writer of one rank: slab segments, an index, a limit with eviction.

Opened by the worker rank that stores the records (open_connector in this package picks it). folder.py gives the tree,
format.py the bytes, slots.py the life of a slot. Exactly one process may have a (namespace, rank) open here; a second
one gets a StorageError that names the first. Lookups and readers in other processes follow the index.

What is durable when:
- STORED under Durability.PROCESS: payload, then entry, are in the kernel's page cache. SIGKILL at any moment loses
  nothing acknowledged. After a power loss a record is there whole or is a miss: its checksum decides.
- `flush` returned True, or STORED under Durability.DISK: it survives a power loss too.
- Recency: least-recently-used order survives `close`; after a kill records are ordered by when they were written.

Room: files are allocated a segment at a time, before they are written, up to this rank's share of max_bytes; entries,
header pages, locks and descriptions count. When the share, the store or the disk is full, the least recently used
records make room; with none to give up a put is FULL.

Locks: puts take turns (`_put_lock`); `_lock` guards the table and the index file and is never held during payload
I/O. A payload being read is pinned, one being written is reserved, so neither can be given to another record.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from fastkv.errors import StorageError
from fastkv.storage.base import (
    Buffer,
    Counters,
    Durability,
    GetOutcome,
    PutOutcome,
    RemoveOutcome,
    check_batch,
    check_digests,
    seconds_left,
)
from fastkv.storage.file_config import FileStoreConfig
from fastkv.storage.fileops import FULL_ERRNOS, FileOps
from fastkv.storage.format import Record, payload_checksum
from fastkv.storage.io_threads import IoThreads
from fastkv.storage.namespace import StorageNamespace
from fastkv.storage.put_batch import PendingWrite, PutBatch
from fastkv.storage.rank_files import RankFiles, open_rank
from fastkv.storage.slots import SlotTable

log = logging.getLogger(__name__)

_GROWTH_RETRY_S = 2.0
_CLOSE_WAIT_S = 10.0


class FileConnector:
    """Storage connector of one writing rank. See StorageConnector for the methods' contracts."""

    def __init__(
        self, files: RankFiles, records: Sequence[Record], config: FileStoreConfig, counters: Counters
    ) -> None:
        self._files, self._config, self._counters = files, config, counters
        self._index, self._segments, self._seed = files.index, files.segments, files.index.seed
        self._threads = IoThreads(config.io_threads)
        self._table = SlotTable()
        self._table.grow(files.num_slots)
        lost = self._table.load(records)
        self._unclean = {record.slot for record in lost}
        self._next_stamp = max((record.stamp for record in records), default=0) + 1
        self._lock, self._put_lock = threading.Lock(), threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._no_growth_until_s = 0.0
        self._touched = self._closed = False

    @classmethod
    def open(
        cls, config: FileStoreConfig, namespace: StorageNamespace, rank: int, ops: FileOps | None = None
    ) -> FileConnector:
        """Open or create one rank's records for writing. Recovers what is there.

        Args:
            config: where, and how much.
            namespace: whose records.
            rank: a rank that stores (0 where ranks hold the same bytes).
            ops: the system calls; another one in tests.

        Raises:
            ConfigError: the path cannot be a store, or the limit holds no record.
            StorageError: another process writes there, the store is full of others' open namespaces, the disk failed.
        """
        counters = Counters()
        files, records = open_rank(config, namespace, rank, ops or FileOps(), counters)
        connector = cls(files, records, config, counters)
        if config.durability is Durability.DISK and not connector.flush():
            connector.close()  # EXISTS must mean the same for what an earlier process wrote, and cannot
            raise StorageError(f"store {files.path} cannot be synced: {connector.last_error()}", level="storage")
        log.info("store %s: %d records in %d slots", files.path, len(connector), files.num_slots)
        return connector

    def __len__(self) -> int:
        """Records that are stored now."""
        return len(self._table)

    @property
    def record_bytes(self) -> int:
        """Largest record that is accepted."""
        return self._index.identity.record_bytes

    @property
    def capacity_records(self) -> int:
        """Records that fit into this rank's share of the limit."""
        return self._files.capacity_slots

    def put(self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float) -> tuple[PutOutcome, ...]:
        """Store records. A batch larger than the store keeps its head. A digest given twice is written once."""
        views = check_batch(digests, buffers, self.record_bytes, writable=False)
        outcomes = self._put(digests, views, deadline_s)
        self._counters.add_outcomes("put", outcomes)
        return outcomes

    def get_into(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float
    ) -> tuple[GetOutcome, ...]:
        """Read records. One that fails its checksum is dropped, so that it can be stored again."""
        views = check_batch(digests, buffers, self.record_bytes, writable=True)
        with self._lock:
            if self._closed:
                return (GetOutcome.UNAVAILABLE,) * len(digests)
            records = [self._table.pin(digest) for digest in digests]
        wanted = [(record, view) for record, view in zip(records, views, strict=True) if record is not None]
        found = iter(
            self._threads.run(lambda item: self._read(item[0], item[1], deadline_s), wanted, self.record_bytes)
        )
        outcomes = tuple(GetOutcome.MISS if record is None else next(found) for record in records)
        with self._lock:
            for record, outcome in zip(records, outcomes, strict=True):
                if record is not None:
                    self._table.unpin(record)
                    if outcome is GetOutcome.CORRUPT and self._table.find(record.digest) is record:
                        self._forget(record)
            hits = [digest for digest, outcome in zip(digests, outcomes, strict=True) if outcome.is_hit]
            self._table.touch(hits)
            self._touched = self._touched or bool(hits)
            self._idle.notify_all()
        self._counters.add_outcomes("get", outcomes)
        return outcomes

    def remove(self, digests: Sequence[bytes]) -> tuple[RemoveOutcome, ...]:
        """Forget records. FAILED: forgotten by this process, but the disk may still list it after a crash."""
        check_digests(digests)
        with self._lock:
            if self._closed:
                return (RemoveOutcome.UNAVAILABLE,) * len(digests)
            outcomes = []
            for digest in digests:
                record = self._table.find(digest)
                if record is None:
                    outcomes.append(RemoveOutcome.MISSING)
                else:
                    outcomes.append(RemoveOutcome.REMOVED if self._forget(record) else RemoveOutcome.FAILED)
        self._counters.add_outcomes("remove", outcomes)
        return tuple(outcomes)

    def flush(self) -> bool:
        """Sync payloads, then entries."""
        with self._put_lock:
            return not self._closed and self._sync()

    def counters(self) -> dict[str, int]:
        """put_*, get_*, remove_* by outcome; evictions, io_errors, growth_refused, resets, ..."""
        return self._counters.snapshot()

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        return self._counters.last_error

    def close(self) -> None:
        """Save the recency, give back the files and the writer's lock. Waits for calls in progress.

        Raises:
            StorageError: one of them did not end in time; its files stay open, so that it cannot touch others.
        """
        if not self._put_lock.acquire(timeout=_CLOSE_WAIT_S):
            raise StorageError(f"store {self._files.path}: a put is stuck, its files stay open", level="storage")
        try:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                if not self._idle.wait_for(lambda: self._table.num_pinned == 0, _CLOSE_WAIT_S):
                    raise StorageError(
                        f"store {self._files.path}: a get is stuck, its files stay open", level="storage"
                    )
                self._save_recency()
            self._threads.close()
            self._files.close()
        finally:
            self._put_lock.release()

    def check_integrity(self) -> None:
        """Recompute what the table claims. For tests.

        Raises:
            InvariantError: with the first contradiction found.
        """
        with self._lock:
            self._table.check_integrity()

    # put, step by step

    def _put(self, digests: Sequence[bytes], views: list[memoryview], deadline_s: float) -> tuple[PutOutcome, ...]:
        if not self._put_lock.acquire(timeout=seconds_left(deadline_s)):
            return (PutOutcome.TIMEOUT,) * len(digests)
        try:
            if self._closed:
                return (PutOutcome.UNAVAILABLE,) * len(digests)
            self._grow_for(set(digests), deadline_s)
            batch = self._reserve(digests, views)
            results = self._threads.run(lambda w: self._write(w, deadline_s), batch.writes, self.record_bytes)
            for write, outcome in zip(batch.writes, results, strict=True):
                batch.outcomes[write.row] = outcome
            self._commit(batch, digests)
        finally:
            self._put_lock.release()
        first_row: dict[bytes, int] = {}
        return tuple(batch.outcomes[first_row.setdefault(digest, row)] for row, digest in enumerate(digests))

    def _grow_for(self, digests: set[bytes], deadline_s: float) -> None:
        """Allocate segments until the batch fits or nothing more is to be had."""
        while time.monotonic() >= self._no_growth_until_s:
            with self._lock:
                missing = sum(self._table.find(digest) is None for digest in digests) - self._table.num_free
            if missing <= 0 or self._files.num_slots >= self._files.capacity_slots:
                return
            try:
                grown = self._files.grow(min(seconds_left(deadline_s), self._config.lock_timeout_s))
            except (OSError, StorageError) as error:
                self._counters.fault("growth_refused", error)
                grown = False
            if not grown:
                self._no_growth_until_s = time.monotonic() + _GROWTH_RETRY_S
                return
            with self._lock:
                self._table.grow(self._files.num_slots)

    def _reserve(self, digests: Sequence[bytes], views: list[memoryview]) -> PutBatch:
        """A slot for every record that is not stored yet; entries of what was evicted for them are gone from disk."""
        batch, stale = PutBatch(), set[int]()
        with self._lock:
            new: dict[bytes, int] = {}
            for row, digest in enumerate(digests):  # first pins: the batch must not evict its own members
                record = None if digest in new else self._table.pin(digest)
                if record is not None:
                    batch.pinned.append(record)
                    batch.outcomes[row] = PutOutcome.EXISTS
                else:
                    new.setdefault(digest, row)
            evictions: list[Record] = []
            for digest, row in new.items():
                reserved = self._table.reserve()
                if reserved is None:
                    batch.outcomes[row] = PutOutcome.FULL
                    continue
                slot, evicted = reserved
                batch.writes.append(PendingWrite(row, digest, slot, views[row]))
                if evicted is not None:
                    evictions.append(evicted)
                if evicted is not None or slot in self._unclean:
                    stale.add(slot)
            if self._clear(stale):
                self._counters.add("evictions", len(evictions))
            else:
                self._undo(batch, evictions)
        return batch

    def _undo(self, batch: PutBatch, evictions: list[Record]) -> None:
        """The disk does not take writes: nothing must be lost for records that cannot be stored."""
        kept = {record.slot for record in evictions}
        self._table.restore(evictions)
        self._unclean -= kept
        self._abandon([write for write in batch.writes if write.slot not in kept], None)
        for write in batch.writes:
            batch.outcomes[write.row] = PutOutcome.FAILED
        batch.writes = []
        try:
            self._index.write(evictions)  # some of their entries may be gone
        except OSError as error:
            self._counters.fault("io_errors", error)

    def _write(self, write: PendingWrite, deadline_s: float) -> PutOutcome:
        if time.monotonic() >= deadline_s:
            return PutOutcome.TIMEOUT
        try:
            write.checksum = payload_checksum(write.view, self._seed)
            self._segments.write(write.slot, write.view)
        except OSError as error:
            self._counters.fault("io_errors", error)
            return PutOutcome.FULL if error.errno in FULL_ERRNOS else PutOutcome.FAILED
        return PutOutcome.STORED

    def _commit(self, batch: PutBatch, digests: Sequence[bytes]) -> None:
        """Acknowledge what was written: payloads synced if that was asked for, entries on disk, then the table."""
        done = [write for write in batch.writes if batch.outcomes[write.row] is PutOutcome.STORED]
        top = self._next_stamp + len(done)  # the chain's head gets the youngest stamp
        records = [Record(w.digest, w.slot, len(w.view), w.checksum, top - row) for row, w in enumerate(done)]
        is_acknowledged = self._write_entries(records)
        with self._lock:
            self._abandon([w for w in batch.writes if batch.outcomes[w.row] is not PutOutcome.STORED], None)
            if is_acknowledged:
                self._next_stamp = top + 1
                for record in records:
                    self._table.commit(record)
            else:
                self._unclean |= {record.slot for record in records}
                self._abandon(done, batch)
            for record in batch.pinned:
                self._table.unpin(record)
            self._table.touch(digests)
            self._touched = self._touched or bool(batch.pinned)
            self._idle.notify_all()

    def _write_entries(self, records: list[Record]) -> bool:
        if not records:
            return True
        is_synced = self._config.durability is Durability.DISK
        if is_synced and not self._sync():
            return False
        try:
            with self._lock:
                self._index.write(records)
            if is_synced:
                self._index.sync()
        except OSError as error:
            self._counters.fault("io_errors", error)
            return False
        return True

    def _abandon(self, writes: list[PendingWrite], batch: PutBatch | None) -> None:
        """Free the slots again; with a batch, its records have failed."""
        for write in writes:
            self._table.abandon(write.slot)
            if batch is not None:
                batch.outcomes[write.row] = PutOutcome.FAILED

    # helpers

    def _read(self, record: Record, view: memoryview, deadline_s: float) -> GetOutcome:
        if time.monotonic() >= deadline_s:
            return GetOutcome.TIMEOUT
        if record.length != len(view):
            self._counters.add("length_mismatch")
            return GetOutcome.MISS
        try:
            self._segments.read_into(record.slot, view)
        except OSError as error:
            self._counters.fault("io_errors", error)
            return GetOutcome.FAILED
        if payload_checksum(view, self._seed) != record.payload_sum:
            self._counters.fault("checksum_errors", f"{self._files.path} slot {record.slot}")
            return GetOutcome.CORRUPT
        return GetOutcome.HIT

    def _forget(self, record: Record) -> bool:
        """Drop a record from table and disk; whether the disk took it. Hold `_lock`."""
        self._table.remove(record.digest)
        return self._clear({record.slot})

    def _clear(self, slots: set[int]) -> bool:
        """Empty entries on disk. Slots whose entry is in doubt are cleared again before they are reused."""
        self._unclean |= slots
        try:
            self._index.clear(slots)
        except OSError as error:
            self._counters.fault("io_errors", error)
            return False
        self._unclean -= slots
        return True

    def _sync(self) -> bool:
        try:
            self._segments.sync()
            self._index.sync()
        except OSError as error:
            self._counters.fault("flush_failed", error)
            return False
        return True

    def _save_recency(self) -> None:
        """Renumber the entries in LRU order, so that the next opening evicts in the same order."""
        if not self._touched:
            return
        try:
            self._index.write([replace(record, stamp=stamp) for stamp, record in enumerate(self._table, start=1)])
        except OSError as error:
            self._counters.fault("io_errors", error)
        with contextlib.suppress(OSError):  # only the age that `make_room` and `ls` go by
            os.utime(self._files.description_path)
