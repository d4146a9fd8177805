"""StorageWorker: whatever the backend does, the caller gets an answer by its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.storage_cases import digest, digests, pattern, patterns, poisoned, store_config, toy_namespace
from helpers.storage_faults import Fault, FaultyConnector, MemoryConnector

from fastkv.errors import ConfigError, InvariantError
from fastkv.storage.base import GetOutcome, PutOutcome, StorageConnector, deadline_in
from fastkv.storage.file import FileConnector
from fastkv.storage.ticket import StorageTicket
from fastkv.storage.write_behind import StorageWorker, StorageWorkerConfig

SIZE = 512


class Rig:
    """Makes workers over a memory connector and closes them."""

    def __init__(self) -> None:
        self.memory = MemoryConnector(SIZE)
        self.workers: list[StorageWorker] = []

    def worker(self, connector: StorageConnector | None = None, **config: float) -> StorageWorker:
        self.workers.append(StorageWorker(connector or self.memory, StorageWorkerConfig(**config)))  # type: ignore[arg-type]
        return self.workers[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.memory.gate.set()
    for worker in rig.workers:
        assert worker.close(drain=False)


def submit_put(
    worker: StorageWorker, *names: object, timeout_s: float = 5.0, wait_s: float = 0.0
) -> StorageTicket[PutOutcome]:
    return worker.submit_put(digests(*names), patterns(names, SIZE), deadline_in(timeout_s), wait_s)


def submit_get(worker: StorageWorker, *names: object, timeout_s: float = 5.0) -> StorageTicket[GetOutcome]:
    return worker.submit_get(digests(*names), poisoned(len(names), SIZE), deadline_in(timeout_s))


def values(ticket: StorageTicket[PutOutcome] | StorageTicket[GetOutcome]) -> list[str]:
    return [outcome.value for outcome in ticket.wait()]


def eventually(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_worker_puts_and_gets_bit_equal(rig: Rig) -> None:
    worker = rig.worker()
    assert values(submit_put(worker, 1, 2)) == ["stored", "stored"]
    buffers = poisoned(3, SIZE)
    ticket = worker.submit_get(digests(2, 3, 1), buffers, deadline_in(5))
    assert values(ticket) == ["hit", "miss", "hit"]
    assert ticket.is_settled
    assert ticket.error is None
    np.testing.assert_array_equal(buffers[0], pattern(2, SIZE))
    np.testing.assert_array_equal(buffers[2], pattern(1, SIZE))


def test_worker_over_the_file_backend_round_trips(tmp_path: Path) -> None:
    space = toy_namespace(record_bytes=SIZE)
    config = store_config(tmp_path, space, records=16)
    worker = StorageWorker(FileConnector.open(config, space, 0))
    tickets = [submit_put(worker, name) for name in range(8)]
    assert [values(ticket) for ticket in tickets] == [["stored"]] * 8
    assert values(submit_get(worker, *range(9))) == ["hit"] * 8 + ["miss"]
    assert worker.close(drain=True)
    again = StorageWorker(FileConnector.open(config, space, 0))
    assert values(submit_get(again, *range(8))) == ["hit"] * 8
    assert again.close(drain=True)


def test_submit_never_blocks_while_the_backend_hangs(rig: Rig) -> None:
    worker = rig.worker()
    rig.memory.gate.clear()
    started = time.monotonic()
    tickets = [submit_put(worker, name) for name in range(10)]
    assert time.monotonic() - started < 0.5
    assert all(ticket.poll() is None and not ticket.is_settled for ticket in tickets)
    rig.memory.gate.set()
    assert [values(ticket) for ticket in tickets] == [["stored"]] * 10


def test_wait_ends_at_the_deadline_and_buffers_settle_later(rig: Rig) -> None:
    """The backend still has the buffers: they are not free, though the caller has its answer."""
    worker = rig.worker()
    rig.memory.gate.clear()
    ticket = submit_get(worker, 1, timeout_s=0.05)
    started = time.monotonic()
    assert values(ticket) == ["timeout"]
    assert time.monotonic() - started < 0.5
    assert not ticket.is_settled
    assert not ticket.wait_settled(deadline_in(0.02))
    rig.memory.gate.set()
    assert ticket.wait_settled(deadline_in(5))
    assert ticket.poll() == (GetOutcome.TIMEOUT,)
    assert worker.counters()["worker_get_timeout"] == 1


def test_poll_sees_the_deadline_without_anybody_waiting(rig: Rig) -> None:
    worker = rig.worker()
    rig.memory.gate.clear()
    ticket = submit_put(worker, 1, timeout_s=0.02)
    time.sleep(0.03)
    assert ticket.poll() == (PutOutcome.TIMEOUT,)


def test_batch_that_expires_in_the_queue_is_never_run(rig: Rig) -> None:
    worker = rig.worker()
    rig.memory.gate.clear()
    submit_put(worker, "first")
    late = submit_put(worker, "late", timeout_s=0.02)
    assert values(late) == ["timeout"]
    assert late.is_settled
    rig.memory.gate.set()
    assert values(submit_put(worker, "last")) == ["stored"]
    assert digest("late") not in rig.memory.records
    assert worker.counters()["worker_put_timeout"] == 1


def test_slow_put_does_not_delay_a_get(rig: Rig) -> None:
    class SlowPuts(MemoryConnector):
        def _enter(self, call: str) -> None:
            if call == "put":
                super()._enter(call)

    slow = SlowPuts(SIZE)
    slow.gate.clear()
    worker = rig.worker(slow)
    put = submit_put(worker, 1)
    assert values(submit_get(worker, 1)) == ["miss"]
    assert put.poll() is None
    slow.gate.set()
    assert values(put) == ["stored"]


def test_full_queue_drops_at_once_and_counts(rig: Rig) -> None:
    worker = rig.worker(max_queued_records=4)
    rig.memory.gate.clear()
    running = submit_put(worker, "running")
    eventually(lambda: worker.num_queued_records == 0)
    queued = submit_put(worker, 1, 2, 3)
    started = time.monotonic()
    dropped = submit_put(worker, 4, 5)
    assert time.monotonic() - started < 0.5
    assert dropped.poll() == (PutOutcome.DROPPED,) * 2
    assert dropped.is_settled
    assert submit_put(worker, 6).poll() is None
    rig.memory.gate.set()
    assert values(running) + values(queued) == ["stored"] * 4
    assert worker.counters()["worker_put_dropped"] == 2


def test_full_queue_with_patience_waits_for_room_or_gives_up(rig: Rig) -> None:
    worker = rig.worker(max_queued_records=1)
    rig.memory.gate.clear()
    submit_put(worker, "running")
    eventually(lambda: worker.num_queued_records == 0)
    submit_put(worker, "queued")
    started = time.monotonic()
    assert values(submit_put(worker, "impatient", wait_s=0.05)) == ["dropped"]
    assert 0.04 < time.monotonic() - started < 1
    threading.Timer(0.05, rig.memory.gate.set).start()
    assert values(submit_put(worker, "patient", wait_s=5)) == ["stored"]


def test_expired_batches_give_their_room_back_while_the_backend_hangs(rig: Rig) -> None:
    worker = rig.worker(max_queued_records=2)
    rig.memory.gate.clear()
    submit_put(worker, "running", timeout_s=60)
    eventually(lambda: worker.num_queued_records == 0)
    submit_put(worker, 1, 2, timeout_s=0.02)
    assert submit_put(worker, 3).poll() == (PutOutcome.DROPPED,)
    time.sleep(0.03)
    assert submit_put(worker, 4).poll() is None


def test_batch_larger_than_the_queue_is_taken_when_it_is_empty(rig: Rig) -> None:
    worker = rig.worker(max_queued_records=2)
    assert values(submit_put(worker, *range(5))) == ["stored"] * 5


def test_stuck_backend_is_unavailable_at_once(rig: Rig) -> None:
    """A call that outlived its deadline: nobody else pays for it."""
    worker = rig.worker()
    rig.memory.gate.clear()
    assert values(submit_get(worker, 1, timeout_s=0.02)) == ["timeout"]
    started = time.monotonic()
    assert values(submit_get(worker, 1, timeout_s=5)) == ["unavailable"]
    assert time.monotonic() - started < 0.5
    rig.memory.gate.set()
    eventually(lambda: values(submit_get(worker, 1)) == ["miss"])


def test_breaker_opens_on_failures_and_probes_after_the_cooldown(rig: Rig) -> None:
    faulty = FaultyConnector(rig.memory, Fault.FAIL, 0, num_calls=3)
    worker = rig.worker(faulty, failure_limit=2, cooldown_s=0.05)
    assert values(submit_put(worker, 1)) == ["failed"]
    assert values(submit_put(worker, 1)) == ["failed"]
    assert worker.breaker_states() == {"put": "open", "get": "closed"}
    assert values(submit_put(worker, 1)) == ["unavailable"]
    assert faulty.trigger.num_calls == 2
    time.sleep(0.06)
    assert values(submit_put(worker, 1)) == ["failed"]  # the probe
    assert values(submit_put(worker, 1)) == ["unavailable"]
    time.sleep(0.06)
    assert values(submit_put(worker, 1)) == ["stored"]
    assert worker.breaker_states()["put"] == "closed"
    assert worker.counters()["breaker_openings"] == 1
    assert worker.counters()["worker_put_unavailable"] == 2


def test_full_store_does_not_open_the_breaker(rig: Rig) -> None:
    worker = rig.worker(FaultyConnector(rig.memory, Fault.FULL, 0, num_calls=5), failure_limit=1, cooldown_s=60)
    for _ in range(3):
        assert values(submit_put(worker, 1)) == ["full"]
    assert worker.breaker_states()["put"] == "closed"


def test_exception_of_the_backend_goes_into_the_ticket(rig: Rig) -> None:
    worker = rig.worker(FaultyConnector(rig.memory, Fault.RAISE, 0))
    ticket = submit_put(worker, 1)
    assert values(ticket) == ["failed"]
    assert isinstance(ticket.error, RuntimeError)
    assert worker.counters()["worker_exceptions"] == 1
    assert "injected" in worker.last_error()
    assert values(submit_put(worker, 1)) == ["stored"]


def test_backend_with_too_few_outcomes_fails_the_batch(rig: Rig) -> None:
    class Short(MemoryConnector):
        def put(self, *args: object) -> tuple[PutOutcome, ...]:
            return (PutOutcome.STORED,)

    ticket = submit_put(rig.worker(Short(SIZE)), 1, 2)
    assert values(ticket) == ["failed", "failed"]
    assert isinstance(ticket.error, InvariantError)


@pytest.mark.parametrize("fault", Fault)
def test_fault_at_every_call_costs_misses_and_no_wrong_byte(fault: Fault) -> None:
    """Put, put, get, get, get: one of the calls goes wrong, for every one of them."""
    call = 0
    while True:
        memory = MemoryConnector(SIZE)
        faulty = FaultyConnector(memory, fault, call, stall_s=0.1)
        worker = StorageWorker(faulty, StorageWorkerConfig(failure_limit=2, cooldown_s=0.0))
        for ticket in [submit_put(worker, 0, 1), submit_put(worker, 2, 3)]:
            assert ticket.wait_settled(deadline_in(5))
        for names in ((0, 1, 2), (3,), (2, 0)):
            buffers = poisoned(len(names), SIZE)
            started = time.monotonic()
            got = worker.submit_get(digests(*names), buffers, deadline_in(0.05))
            outcomes = got.wait()
            assert time.monotonic() - started < 1
            for name, outcome, buffer in zip(names, outcomes, buffers, strict=True):
                if outcome.is_hit:
                    np.testing.assert_array_equal(buffer, pattern(name, SIZE))
            assert got.wait_settled(deadline_in(5))
        counted = worker.counters()
        assert worker.close(drain=True, deadline_s=deadline_in(5))
        assert memory.is_closed
        if not faulty.trigger.has_come:
            break
        assert fault is Fault.STALL or any(name.startswith("injected") for name in counted)
        call += 1
    assert call == 5


def test_close_with_drain_carries_out_what_is_queued(rig: Rig) -> None:
    worker = rig.worker()
    rig.memory.gate.clear()
    tickets = [submit_put(worker, name) for name in range(5)]
    threading.Timer(0.03, rig.memory.gate.set).start()
    assert worker.close(drain=True, deadline_s=deadline_in(5))
    assert [values(ticket) for ticket in tickets] == [["stored"]] * 5
    assert rig.memory.is_closed
    assert values(submit_put(worker, 9)) == ["unavailable"]


def test_close_without_drain_drops_what_is_queued(rig: Rig) -> None:
    worker = rig.worker()
    rig.memory.gate.clear()
    running, queued = submit_put(worker, 1), submit_put(worker, 2)
    eventually(lambda: worker.num_queued_records == 1)
    threading.Timer(0.03, rig.memory.gate.set).start()
    assert worker.close(drain=False, deadline_s=deadline_in(5))
    assert values(running) == ["stored"]
    assert values(queued) == ["dropped"]
    assert queued.is_settled


def test_close_of_a_stuck_backend_ends_at_its_deadline_and_says_so(rig: Rig) -> None:
    worker = rig.worker()
    rig.memory.gate.clear()
    stuck, queued = submit_put(worker, 1), submit_put(worker, 2)
    eventually(lambda: worker.num_queued_records == 1)
    started = time.monotonic()
    assert not worker.close(drain=True, deadline_s=deadline_in(0.05))
    assert time.monotonic() - started < 1
    assert not rig.memory.is_closed  # it is still in use
    assert values(queued) == ["dropped"]
    assert not stuck.is_settled


def test_puts_run_in_the_order_they_were_submitted(rig: Rig) -> None:
    worker = rig.worker()
    tickets = [submit_put(worker, name) for name in range(5)]
    assert [values(ticket) for ticket in tickets] == [["stored"]] * 5
    assert list(rig.memory.records) == digests(*range(5))


def test_misfit_batch_is_an_error_of_the_caller(rig: Rig) -> None:
    worker = rig.worker()
    with pytest.raises(InvariantError, match="1 digests with 0"):
        worker.submit_put(digests(1), [], deadline_in(1))
    with pytest.raises(InvariantError, match="32 bytes"):
        worker.submit_put([b"x"], patterns(["x"], SIZE), deadline_in(1))


def test_nonsense_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_queued_records"):
        StorageWorkerConfig(max_queued_records=0)
    with pytest.raises(ConfigError, match="failure_limit"):
        StorageWorkerConfig(failure_limit=0)


def test_many_threads_submit_and_every_ticket_ends(rig: Rig) -> None:
    worker = rig.worker(max_queued_records=8)
    ended: list[str] = []

    def client(number: int) -> None:
        for step in range(30):
            ended.extend(values(submit_put(worker, (number, step), wait_s=1.0)))
            ended.extend(values(submit_get(worker, (number, step))))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 4 * 30 * 2
    assert set(ended) <= {"stored", "hit", "dropped", "miss"}
    assert ended.count("stored") >= 100
