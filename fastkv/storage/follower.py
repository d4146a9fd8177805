"""IndexFollower: a read-only view of another process's index, kept up to date cheaply.

Owned by FileLookup (one for each rank) and FileReader, from one thread at a time. `refresh` costs one stat and one read
of 4 KiB when nothing changed; otherwise the entries of the segments that changed are compared with their last state.
The view may lag behind the writer; it never holds a record that the writer has not acknowledged.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastkv.storage.fileops import FileOps
from fastkv.storage.format import (
    COUNTERS_OFFSET,
    ENTRY_BYTES,
    HEADER_BYTES,
    MAX_SEGMENTS,
    IndexIdentity,
    Record,
    decode_entry,
    entry_offset,
)
from fastkv.storage.index_file import INDEX_NAME

_ROW_WORDS = ENTRY_BYTES // 8


class IndexFollower:
    """The records of one rank of one namespace, as last seen."""

    def __init__(self, folder: Path, namespace: bytes, rank: int, ops: FileOps) -> None:
        self._path, self._namespace, self._rank, self._ops = folder / INDEX_NAME, namespace, rank, ops
        self._fd = -1
        self._inode = -1
        self._page = b""
        self.identity: IndexIdentity | None = None
        self.generation = 0  # changes whenever a writer opened or the file was replaced
        self._forget_records()

    def find(self, digest: bytes) -> Record | None:
        """The record of a digest, as of the last refresh."""
        return self._records.get(digest)

    def __len__(self) -> int:
        return len(self._records)

    def refresh(self, deadline_s: float) -> None:
        """Catch up with the writer. At the deadline it stops between two segments; the next call goes on.

        Raises:
            OSError: the disk failed. The view is as it was or, if the file is gone, empty.
        """
        if not self._reopen():
            return
        page = self._ops.read(self._fd, HEADER_BYTES, 0)
        if page == self._page:
            return
        if page[:COUNTERS_OFFSET] != self._page[:COUNTERS_OFFSET]:  # another identity, or a new epoch
            self._forget_records()
            identity = IndexIdentity.decode(page)
            if identity is None or (identity.namespace, identity.rank) != (self._namespace, self._rank):
                self.identity, self._page = None, page
                return
            self.identity, self._seed = identity, identity.seed
            self.generation += 1
            self._page = page[:COUNTERS_OFFSET]  # the counters count as unseen until every segment was scanned
            self._counters = np.full(MAX_SEGMENTS, -1, np.int64)
            self._counters[self._num_segments() :] = _counters_of(page)[self._num_segments() :]
        if self.identity is None:
            return
        counters = _counters_of(page)
        for segment in np.flatnonzero(counters != self._counters).tolist():
            if time.monotonic() >= deadline_s:
                return
            self._scan(segment, self.identity.slots_per_segment)
            self._counters[segment] = counters[segment]
        self._page = page

    def close(self) -> None:
        """Close the file; the view is empty then."""
        if self._fd >= 0:
            self._ops.close(self._fd)
        self._fd, self._inode, self._page, self.identity = -1, -1, b"", None
        self._forget_records()

    def _reopen(self) -> bool:
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            self.close()
            return False
        if inode != self._inode:
            self.close()
            try:
                self._fd = self._ops.open(self._path, writable=False)
            except FileNotFoundError:
                return False
            self._inode = inode
        return True

    def _num_segments(self) -> int:
        assert self.identity is not None
        slots = (self._ops.size(self._fd) - HEADER_BYTES) // ENTRY_BYTES
        return min(-(-slots // self.identity.slots_per_segment), MAX_SEGMENTS)

    def _scan(self, segment: int, slots_per_segment: int) -> None:
        first = segment * slots_per_segment
        table = self._ops.read(self._fd, slots_per_segment * ENTRY_BYTES, entry_offset(first))
        rows = _rows(table)
        known = self._tables.get(segment)
        if known is None:
            changed = np.flatnonzero(rows[:, 0])
        else:
            shared = min(len(known), len(rows))
            differs = (rows[:shared] != known[:shared]).any(axis=1)
            changed = np.concatenate([np.flatnonzero(differs), np.arange(shared, len(rows))])
        for row in changed.tolist():
            self._set(first + row, decode_entry(rows[row].tobytes(), first + row, self._seed))
        self._tables[segment] = rows

    def _set(self, slot: int, record: Record | None) -> None:
        old = self._by_slot.pop(slot, None)
        if old is not None and self._records.get(old.digest) is old:
            del self._records[old.digest]
        if record is not None:
            self._by_slot[slot] = self._records[record.digest] = record

    def _forget_records(self) -> None:
        self._records: dict[bytes, Record] = {}
        self._by_slot: dict[int, Record] = {}
        self._tables: dict[int, npt.NDArray[np.uint64]] = {}
        self._counters = np.full(MAX_SEGMENTS, -1, np.int64)
        self._seed = 0


def _counters_of(page: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(page, np.int64, count=MAX_SEGMENTS, offset=COUNTERS_OFFSET)


def _rows(table: bytes) -> npt.NDArray[np.uint64]:
    whole = len(table) // ENTRY_BYTES
    return np.frombuffer(table, np.uint64, count=whole * _ROW_WORDS).reshape(whole, _ROW_WORDS)
