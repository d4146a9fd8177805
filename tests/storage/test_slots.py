"""SlotTable against a dict that remembers everything the obvious way."""

from __future__ import annotations

import pytest
from helpers.storage_cases import digest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastkv.errors import InvariantError
from fastkv.storage.format import Record
from fastkv.storage.slots import SlotTable

NAMES = st.integers(0, 11)


def record(name: int, slot: int, stamp: int = 0) -> Record:
    return Record(digest(name), slot, 8, name, stamp)


class SlotTableMachine(RuleBasedStateMachine):
    """Stored names in a list, oldest first; pins by name; removed but pinned slots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable()
        self.table.grow(3)
        self.order: list[int] = []
        self.pins: dict[int, list[Record]] = {}
        self.doomed: list[list[Record]] = []
        self.reserved: dict[int, int] = {}

    @rule()
    @precondition(lambda self: self.table.num_slots < 8)
    def grow(self) -> None:
        self.table.grow(self.table.num_slots + 2)

    @rule(name=NAMES)
    def reserve(self, name: int) -> None:
        if name in self.order or name in self.reserved:
            return
        free = self.table.num_slots - len(self.order) - len(self.reserved) - len(self.doomed)
        assert self.table.num_free == free
        victim = next((old for old in self.order if not self.pins.get(old)), None)
        got = self.table.reserve()
        if free == 0 and victim is None:
            assert got is None
            return
        assert got is not None
        slot, evicted = got
        assert (evicted is None) == (free > 0)
        if evicted is not None:
            assert evicted.digest == digest(victim)
            self.order.remove(victim)
        self.reserved[name] = slot

    @rule(count=st.integers(1, 4))
    def reserve_then_restore(self, count: int) -> None:
        """A batch whose evictions could not be written. Nothing is lost; older pinned records are now younger."""
        evicted = []
        for slot, old in filter(None, [self.table.reserve() for _ in range(count)]):
            if old is None:
                self.table.abandon(slot)
            else:
                evicted.append(old)
        self.table.restore(evicted)
        returned = {old.digest for old in evicted}
        back = [name for name in self.order if digest(name) in returned]
        self.order = back + [name for name in self.order if name not in back]

    @rule(stored=st.booleans())
    @precondition(lambda self: self.reserved)
    def end_write(self, stored: bool) -> None:
        name, slot = self.reserved.popitem()
        if stored:
            self.table.commit(record(name, slot))
            self.order.append(name)
        else:
            self.table.abandon(slot)

    @rule(name=NAMES)
    def pin(self, name: int) -> None:
        pinned = self.table.pin(digest(name))
        assert (pinned is not None) == (name in self.order)
        if pinned is not None:
            self.pins.setdefault(name, []).append(pinned)

    @rule(name=NAMES)
    def unpin(self, name: int) -> None:
        if self.pins.get(name):
            self.table.unpin(self.pins[name].pop())

    @rule()
    @precondition(lambda self: self.doomed)
    def unpin_removed(self) -> None:
        self.table.unpin(self.doomed[0].pop())
        if not self.doomed[0]:
            self.doomed.pop(0)

    @rule(name=NAMES)
    def remove(self, name: int) -> None:
        removed = self.table.remove(digest(name))
        assert (removed is not None) == (name in self.order)
        if name in self.order:
            self.order.remove(name)
            if pins := self.pins.pop(name, []):
                self.doomed.append(pins)

    @rule(names=st.lists(NAMES, max_size=4, unique=True))
    def touch(self, names: list[int]) -> None:
        self.table.touch([digest(name) for name in names])
        for name in reversed(names):
            if name in self.order:
                self.order.remove(name)
                self.order.append(name)

    @invariant()
    def agrees(self) -> None:
        self.table.check_integrity()
        assert [found.digest for found in self.table] == [digest(name) for name in self.order]
        assert len(self.table) == len(self.order)


SlotTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotTable = SlotTableMachine.TestCase


def test_slots_load_keeps_the_younger_of_two_records_of_one_digest() -> None:
    table = SlotTable()
    table.grow(4)
    lost = table.load([record(1, slot=0, stamp=5), record(1, slot=2, stamp=9), record(2, slot=3), record(3, slot=7)])
    table.check_integrity()
    found = table.find(digest(1))
    assert found is not None
    assert found.slot == 2
    assert sorted(item.slot for item in lost) == [0, 7]
    assert table.num_free == 2


def test_slots_load_orders_by_stamp() -> None:
    table = SlotTable()
    table.grow(3)
    table.load([record(1, slot=0, stamp=30), record(2, slot=1, stamp=10), record(3, slot=2, stamp=20)])
    assert [found.payload_sum for found in table] == [2, 3, 1]


def test_slots_chain_is_given_up_from_its_tail() -> None:
    """The head of a chain outlives its tail: a lookup stops at the first miss."""
    table = SlotTable()
    table.grow(3)
    for name in (0, 1, 2):
        slot, _ = table.reserve() or (-1, None)
        table.commit(record(name, slot))
    table.touch([digest(0), digest(1), digest(2)])
    gone = [table.reserve() for _ in range(3)]
    assert [evicted.payload_sum for _, evicted in filter(None, gone) if evicted] == [2, 1, 0]


def test_slots_pinned_records_are_passed_over_until_they_are_unpinned() -> None:
    """Kind "in flight": a record that is being read must not be written over."""
    table = SlotTable()
    table.grow(2)
    for name in (0, 1):
        slot, _ = table.reserve() or (-1, None)
        table.commit(record(name, slot))
    pinned = table.pin(digest(0))
    assert pinned is not None
    _, evicted = table.reserve() or (-1, None)
    assert evicted is not None
    assert evicted.payload_sum == 1  # the younger one
    assert table.reserve() is None
    table.unpin(pinned)
    _, evicted = table.reserve() or (-1, None)
    assert evicted is pinned


def test_slots_misuse_is_an_error_and_changes_nothing() -> None:
    table = SlotTable()
    table.grow(2)
    slot, _ = table.reserve() or (-1, None)
    table.commit(record(1, slot))
    with pytest.raises(InvariantError):
        table.commit(record(2, slot))
    with pytest.raises(InvariantError):
        table.abandon(slot)
    with pytest.raises(InvariantError):
        table.unpin(record(1, slot))
    table.check_integrity()
    assert len(table) == 1
