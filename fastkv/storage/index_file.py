"""IndexFile: a rank's index as its one writer sees it. format.py gives the bytes.

Owned by FileConnector, called under its lock. Everything goes through write, not through a mapping: on a full or broken
disk that is an OSError where a store into a mapping would kill the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fastkv.storage.fileops import FileOps
from fastkv.storage.format import (
    COUNTERS_OFFSET,
    EMPTY_ENTRY,
    ENTRY_BYTES,
    EPOCH_OFFSET,
    HEADER_BYTES,
    MAX_SEGMENTS,
    IndexIdentity,
    Record,
    decode_entries,
    entry_offset,
)

INDEX_NAME = "index"
_U64_MASK = 2**64 - 1


class IndexFile:
    """The index of one rank, open for writing."""

    def __init__(self, fd: int, identity: IndexIdentity, page: bytearray, ops: FileOps) -> None:
        self._fd, self._page, self._ops = fd, page, ops
        self.identity = identity
        self.seed = identity.seed

    @classmethod
    def open(cls, folder: Path, ops: FileOps) -> IndexFile | None:
        """The index in a rank's folder; None if there is none, or its header is torn or foreign."""
        path = folder / INDEX_NAME
        if not path.exists():
            return None
        fd = ops.open(path)
        try:
            page = ops.read(fd, HEADER_BYTES, 0)
            identity = IndexIdentity.decode(page)
        except OSError:
            ops.close(fd)
            raise
        if identity is None:
            ops.close(fd)
            return None
        return cls(fd, identity, bytearray(page), ops)

    @classmethod
    def create(cls, folder: Path, identity: IndexIdentity, ops: FileOps) -> IndexFile:
        """A new index without slots. It appears under its name only when it is whole."""
        page = bytearray(HEADER_BYTES)
        encoded = identity.encode()
        page[: len(encoded)] = encoded
        scratch = folder / (INDEX_NAME + ".new")
        ops.unlink(scratch)
        fd = ops.open(scratch, create=True)
        try:
            ops.write(fd, bytes(page), 0)
            scratch.rename(folder / INDEX_NAME)
        except OSError:
            ops.close(fd)
            ops.unlink(scratch)
            raise
        return cls(fd, identity, page, ops)

    @property
    def num_slots(self) -> int:
        """Slots that the file has an entry for."""
        return (self._ops.size(self._fd) - HEADER_BYTES) // ENTRY_BYTES

    def load(self, num_slots: int) -> list[Record]:
        """All valid records of the first num_slots slots."""
        records: list[Record] = []
        for first in range(0, num_slots, self.identity.slots_per_segment):
            count = min(self.identity.slots_per_segment, num_slots - first)
            table = self._ops.read(self._fd, count * ENTRY_BYTES, entry_offset(first))
            records += decode_entries(table, first, self.seed)
        return records

    def resize(self, num_slots: int) -> None:
        """Make the file hold exactly num_slots entries; new ones are empty.

        Raises:
            OSError: no room; the file has its old length.
        """
        before, after = self._ops.size(self._fd), entry_offset(num_slots)
        if after < before:
            self._ops.truncate(self._fd, after)
        elif after > before:
            try:
                self._ops.allocate(self._fd, before, after - before)
            except OSError:
                self._ops.truncate(self._fd, before)
                raise

    def write(self, records: Sequence[Record]) -> None:
        """Write the entries of records, then let readers know."""
        self._write_rows([(record.slot, record.encode(self.seed)) for record in records])

    def clear(self, slots: Iterable[int]) -> None:
        """Empty the entries of slots, then let readers know."""
        self._write_rows([(slot, EMPTY_ENTRY) for slot in slots])

    def begin_epoch(self) -> None:
        """Make every reader rescan everything."""
        self._raise_counter(EPOCH_OFFSET)
        self._ops.write(self._fd, bytes(self._page), 0)

    def sync(self) -> None:
        """Wait until all entries are on the disk."""
        self._ops.sync(self._fd)

    def close(self) -> None:
        """Close the file."""
        self._ops.close(self._fd)

    def _write_rows(self, rows: list[tuple[int, bytes]]) -> None:
        if not rows:
            return
        rows.sort()
        run_start, run = rows[0][0], bytearray()
        for slot, entry in rows:
            if run and slot != run_start + len(run) // ENTRY_BYTES:
                self._ops.write(self._fd, bytes(run), entry_offset(run_start))
                run_start, run = slot, bytearray()
            run += entry
        self._ops.write(self._fd, bytes(run), entry_offset(run_start))
        for segment in {slot // self.identity.slots_per_segment for slot, _ in rows}:
            self._raise_counter(COUNTERS_OFFSET + 8 * min(segment, MAX_SEGMENTS - 1))
        self._ops.write(self._fd, bytes(self._page), 0)

    def _raise_counter(self, offset: int) -> None:
        value = (int.from_bytes(self._page[offset : offset + 8], "little") + 1) & _U64_MASK
        self._page[offset : offset + 8] = value.to_bytes(8, "little")
