"""SegmentFiles: the payload files of one rank, opened once, addressed by slot.

Owned by a rank's writer, or by a reader of its records. Segment i holds slots i*S .. (i+1)*S-1; the last one may be
shorter and grow later. Files are preallocated, so a write into an existing slot cannot run out of disk.
"""

from __future__ import annotations

import threading
from pathlib import Path

from fastkv.storage.fileops import FileOps
from fastkv.storage.format import IndexIdentity, segment_name


class SegmentFiles:
    """Payload segments of one rank. Reads and writes of different slots may run at the same time."""

    def __init__(self, folder: Path, identity: IndexIdentity, ops: FileOps, *, writable: bool) -> None:
        self._folder, self._identity, self._ops, self._writable = folder, identity, ops, writable
        self._fds: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._is_folder_dirty = False
        self._lock = threading.Lock()

    def allocate(self, num_slots: int) -> None:
        """Make the segment of slot num_slots-1 hold all slots up to it. Earlier segments must be whole.

        Raises:
            OSError: no room; a file that this call created is gone again, one that it extended has its old length.
        """
        segment, last = divmod(num_slots - 1, self._identity.slots_per_segment)
        fd = self._fd(segment, create=True)
        before = self._ops.size(fd)
        self._is_folder_dirty = True
        try:
            self._ops.allocate(fd, 0, (last + 1) * self._identity.slot_bytes)
        except OSError:
            if before == 0:
                self.drop(segment)
            else:
                self._ops.truncate(fd, before)
            raise

    def whole_slots(self, limit: int) -> int:
        """How many of the first limit slots have their payload's place on disk, without a gap."""
        per_segment, slot_bytes = self._identity.slots_per_segment, self._identity.slot_bytes
        slots = 0
        while slots < limit:
            segment = slots // per_segment
            path = self._folder / segment_name(segment)
            if not path.exists():
                break
            here = min(per_segment, self._ops.size(self._fd(segment)) // slot_bytes)
            slots += here
            if here < per_segment:
                break
        return min(slots, limit)

    def mark_unsynced(self, num_slots: int) -> None:
        """What an earlier process wrote may never have been synced: the next `sync` covers it."""
        self._dirty.update(range(-(-num_slots // self._identity.slots_per_segment)))
        self._is_folder_dirty = True

    def cut(self, num_slots: int) -> None:
        """Give back everything past num_slots slots, and segment files that nobody knows."""
        per_segment, slot_bytes = self._identity.slots_per_segment, self._identity.slot_bytes
        keep = -(-num_slots // per_segment)
        for path in self._folder.glob("segment-*"):
            number = path.name.removeprefix("segment-")
            if not number.isdigit() or int(number) >= keep:
                self._forget(int(number) if number.isdigit() else -1)
                self._ops.unlink(path)
        if keep:
            fd, length = self._fd(keep - 1), (num_slots - (keep - 1) * per_segment) * slot_bytes
            if self._ops.size(fd) > length:
                self._ops.truncate(fd, length)

    def write(self, slot: int, payload: memoryview) -> None:
        """Write a payload into a slot."""
        segment, row = divmod(slot, self._identity.slots_per_segment)
        self._dirty.add(segment)
        self._ops.write(self._fd(segment), payload, row * self._identity.slot_bytes)

    def read_into(self, slot: int, view: memoryview) -> None:
        """Fill view from the start of a slot."""
        segment, row = divmod(slot, self._identity.slots_per_segment)
        self._ops.read_into(self._fd(segment), view, row * self._identity.slot_bytes)

    def sync(self) -> None:
        """Wait until everything written is on the disk. Not beside a write. After an error all of it is due again."""
        for segment in sorted(self._dirty):
            self._ops.sync(self._fd(segment))
        if self._is_folder_dirty:
            self._ops.sync_folder(self._folder)
        self._dirty.clear()
        self._is_folder_dirty = False

    def drop(self, segment: int) -> None:
        """Close and delete a segment."""
        self._forget(segment)
        self._ops.unlink(self._folder / segment_name(segment))

    def close(self) -> None:
        """Close all files. Nobody may be reading or writing."""
        for segment in list(self._fds):
            self._forget(segment)

    def _forget(self, segment: int) -> None:
        self._dirty.discard(segment)
        fd = self._fds.pop(segment, None)
        if fd is not None:
            self._ops.close(fd)

    def _fd(self, segment: int, *, create: bool = False) -> int:
        fd = self._fds.get(segment)
        if fd is None:
            with self._lock:  # two readers may want the same file first
                fd = self._fds.get(segment)
                if fd is None:
                    path = self._folder / segment_name(segment)
                    fd = self._fds[segment] = self._ops.open(path, create=create, writable=self._writable)
        return fd
