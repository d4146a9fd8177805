"""SlotTable: which record is in which slot, in memory, and which slot is given up next. No I/O.

Owned by the writer of one rank, which calls it under its lock. A slot is in exactly one state:

    FREE --reserve--> RESERVED --commit--> STORED --evict (by reserve) / remove--> FREE
                          |------abandon------> FREE
                          '------restore------> STORED       pinned and removed: DOOMED --last unpin--> FREE

Eviction is least recently used: the order of one dict, oldest first. Pinned records (being read, or just promised to a
caller) are skipped. `touch` takes a batch in token order and makes its first digest the youngest, so that a chain is
given up from its tail: a lookup stops at the first miss, hence a head that is gone wastes everything behind it.

Costs: O(1) for each record, plus the pinned records at the old end that an eviction skips.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from fastkv.errors import InvariantError
from fastkv.storage.format import Record


class SlotTable:
    """Records by digest in LRU order, free slots, pins."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._free: list[int] = []
        self._reserved: set[int] = set()
        self._pins: dict[int, int] = {}
        self._doomed: set[int] = set()
        self.num_slots = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        """Records, least recently used first."""
        return iter(self._records.values())

    def grow(self, num_slots: int) -> None:
        """Add free slots: num_slots .. are the new total."""
        self._free.extend(range(num_slots - 1, self.num_slots - 1, -1))
        self.num_slots = max(self.num_slots, num_slots)

    def load(self, records: Iterable[Record]) -> list[Record]:
        """Fill an unused table of num_slots free slots with what the disk holds.

        Returns:
            Records that lost: of two with one digest the older by stamp, and those past the last slot.
        """
        lost: list[Record] = []
        for record in sorted(records, key=lambda r: r.stamp):
            if record.slot >= self.num_slots:
                lost.append(record)
                continue
            older = self._records.pop(record.digest, None)
            if older is not None:
                lost.append(older)
            self._records[record.digest] = record
        taken = {record.slot for record in self}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in taken]
        return lost

    def find(self, digest: bytes) -> Record | None:
        """The record of a digest. Does not touch it."""
        return self._records.get(digest)

    def pin(self, digest: bytes) -> Record | None:
        """The record of a digest, kept from eviction until `unpin`; None if there is none."""
        record = self._records.get(digest)
        if record is not None:
            self._pins[record.slot] = self._pins.get(record.slot, 0) + 1
        return record

    def unpin(self, record: Record) -> None:
        """Undo one `pin`."""
        count = self._pins.get(record.slot, 0)
        if count < 1:
            raise InvariantError(f"slot {record.slot} is unpinned more often than pinned")
        if count > 1:
            self._pins[record.slot] = count - 1
            return
        del self._pins[record.slot]
        if record.slot in self._doomed:
            self._doomed.remove(record.slot)
            self._free.append(record.slot)

    @property
    def num_pinned(self) -> int:
        """Slots that are pinned now."""
        return len(self._pins)

    @property
    def num_free(self) -> int:
        """Slots that `reserve` gives out before it evicts."""
        return len(self._free)

    def reserve(self) -> tuple[int, Record | None] | None:
        """A slot to write to, and the record that was evicted for it; None if everything is pinned or reserved."""
        if self._free:
            slot = self._free.pop()
            self._reserved.add(slot)
            return slot, None
        for record in self._records.values():
            if record.slot not in self._pins:
                del self._records[record.digest]
                self._reserved.add(record.slot)
                return record.slot, record
        return None

    def commit(self, record: Record) -> None:
        """A reserved slot now holds this record; it becomes the most recently used."""
        if record.slot not in self._reserved or record.digest in self._records:
            raise InvariantError(f"slot {record.slot} is not reserved, or its digest is stored already")
        self._reserved.remove(record.slot)
        self._records[record.digest] = record

    def restore(self, evicted: Sequence[Record]) -> None:
        """Undo the evictions of `reserve`, given in their order: nothing was written to the slots.

        They are the oldest again; pinned records that were older, and that `reserve` passed over, now come after them.
        """
        for record in reversed(evicted):
            if record.slot not in self._reserved or record.digest in self._records:
                raise InvariantError(f"slot {record.slot} is not reserved, or its digest is stored already")
            self._reserved.remove(record.slot)
            self._records[record.digest] = record
            self._records.move_to_end(record.digest, last=False)

    def abandon(self, slot: int) -> None:
        """A reserved slot was not written after all."""
        if slot not in self._reserved:
            raise InvariantError(f"slot {slot} is not reserved")
        self._reserved.remove(slot)
        self._free.append(slot)

    def remove(self, digest: bytes) -> Record | None:
        """Forget a record. Its slot is free at once, or with the last pin."""
        record = self._records.pop(digest, None)
        if record is None:
            return None
        if record.slot in self._pins:
            self._doomed.add(record.slot)
        else:
            self._free.append(record.slot)
        return record

    def touch(self, digests: Iterable[bytes]) -> None:
        """Records just used, in token order: the first becomes the youngest. Unknown digests are ignored."""
        for digest in reversed(list(digests)):
            if digest in self._records:
                self._records.move_to_end(digest)

    def check_integrity(self) -> None:
        """Recompute that every slot is in exactly one state.

        Raises:
            InvariantError: with the first contradiction found.
        """
        stored = [record.slot for record in self]
        slots = sorted([*stored, *self._free, *self._reserved, *self._doomed])
        if slots != list(range(self.num_slots)):
            raise InvariantError(f"slots are lost or in two states: {slots} of {self.num_slots}")
        if not set(self._pins) <= {*stored, *self._doomed} or any(count < 1 for count in self._pins.values()):
            raise InvariantError(f"pins on slots that hold nothing: {self._pins}")
        if not self._doomed <= set(self._pins):
            raise InvariantError("a doomed slot is not pinned and will never be free")
        if any(digest != record.digest for digest, record in self._records.items()):
            raise InvariantError("a record is filed under another digest")
