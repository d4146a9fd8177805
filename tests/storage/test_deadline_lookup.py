"""DeadlineLookup: the scheduler never waits for storage longer than it said."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
from helpers.storage_cases import digests
from helpers.storage_faults import MemoryConnector

from fastkv.storage.base import deadline_in
from fastkv.storage.breaker import BreakerState
from fastkv.storage.deadline_lookup import DeadlineLookup


@pytest.fixture
def backend() -> Iterator[MemoryConnector]:
    backend = MemoryConnector(8)
    backend.records = dict.fromkeys(digests(1, 2), b"x")
    yield backend
    backend.gate.set()


def test_lookup_answers_as_the_backend_does(backend: MemoryConnector) -> None:
    lookup = DeadlineLookup(backend)
    assert lookup.contains(digests(1, 2, 3), deadline_in(5)) == 2
    assert lookup.contains(digests(3, 1), deadline_in(5)) == 0
    lookup.close()
    assert backend.is_closed
    assert lookup.contains(digests(1), deadline_in(5)) == 0


def test_hanging_backend_is_a_miss_at_the_deadline_then_at_once(backend: MemoryConnector) -> None:
    lookup = DeadlineLookup(backend)
    backend.gate.clear()
    started = time.monotonic()
    assert lookup.contains(digests(1), deadline_in(0.05)) == 0
    assert 0.04 < time.monotonic() - started < 0.5
    started = time.monotonic()
    assert lookup.contains(digests(1), deadline_in(5)) == 0
    assert time.monotonic() - started < 0.5
    assert lookup.counters()["lookup_abandoned"] == 1
    assert lookup.counters()["lookup_refused"] == 1
    backend.gate.set()
    limit = time.monotonic() + 5
    while lookup.contains(digests(1), deadline_in(1)) != 1:
        assert time.monotonic() < limit
    lookup.close()


def test_late_answer_is_not_given_to_the_next_question(backend: MemoryConnector) -> None:
    lookup = DeadlineLookup(backend)
    backend.gate.clear()
    assert lookup.contains(digests(1, 2), deadline_in(0.02)) == 0
    backend.gate.set()
    answers = [lookup.contains(digests(3), deadline_in(1)) for _ in range(20)]
    assert answers == [0] * 20  # not the 2 that the first question would have got
    limit = time.monotonic() + 5
    while lookup.contains(digests(1, 2), deadline_in(1)) != 2:
        assert time.monotonic() < limit
    assert lookup.contains(digests(3), deadline_in(5)) == 0
    lookup.close()


def test_lookup_that_raises_is_a_counted_miss_and_opens_the_breaker() -> None:
    class Broken(MemoryConnector):
        num_calls = 0

        def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
            self.num_calls += 1
            raise RuntimeError("no route to host")

    backend = Broken(8)
    lookup = DeadlineLookup(backend, failure_limit=2, cooldown_s=0.05)
    for _ in range(4):
        assert lookup.contains(digests(1), deadline_in(5)) == 0
    assert backend.num_calls == 2
    assert lookup.breaker_state is BreakerState.OPEN
    assert lookup.counters()["lookup_exceptions"] == 2
    assert "no route" in lookup.last_error()
    time.sleep(0.06)
    lookup.contains(digests(1), deadline_in(5))
    assert backend.num_calls == 3
    lookup.close()


def test_close_of_a_hanging_lookup_does_not_wait_for_it(backend: MemoryConnector) -> None:
    lookup = DeadlineLookup(backend)
    backend.gate.clear()
    lookup.contains(digests(1), deadline_in(0.02))
    started = time.monotonic()
    lookup.close()
    assert time.monotonic() - started < 1
    assert not backend.is_closed
