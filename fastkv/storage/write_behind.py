"""StorageWorker: storage off the critical path. Puts are written behind, gets are prefetched while a request waits.

Owned by a worker rank; wraps any StorageConnector. Two lanes, each a thread with a bounded queue and a circuit breaker
of its own, so that a slow write never delays a read:

    submit_put --> put lane --.
                               >-- connector
    submit_get --> get lane --'

What always holds, whatever the backend does (hangs, fails, raises):
- submit never blocks longer than it was told to, a ticket's wait never longer than its deadline.
- A batch that cannot be queued is refused at once: DROPPED if the queue is full (a put may ask to wait for room),
  UNAVAILABLE if the breaker is open, the backend is stuck past a deadline, or the worker is closed. Losing a put costs
  a later miss, losing a get a recomputation; waiting would cost every request.
- Queue room is counted in records, because each holds a host block. A batch larger than the whole queue is taken when
  the queue is empty.
- Batches of a lane run in the order they were submitted.

Failures of the backend, for the breaker, are FAILED and TIMEOUT outcomes, exceptions, and calls that end after their
deadline. FULL, MISS and CORRUPT are not: the backend works.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastkv.errors import ConfigError, InvariantError
from fastkv.storage.base import (
    Buffer,
    Counters,
    GetOutcome,
    PutOutcome,
    StorageConnector,
    check_batch,
    deadline_in,
    seconds_left,
)
from fastkv.storage.breaker import BreakerState, CircuitBreaker
from fastkv.storage.ticket import StorageTicket, finished

OutcomeT = TypeVar("OutcomeT", PutOutcome, GetOutcome)


@dataclass(frozen=True, slots=True)
class StorageWorkerConfig:
    """Bounds of a StorageWorker.

    Attributes:
        max_queued_records: records that wait in each lane; each holds a host block.
        failure_limit: failures in a row after which a lane's breaker opens.
        cooldown_s: how long it stays open before one batch is tried.
    """

    max_queued_records: int = 256
    failure_limit: int = 3
    cooldown_s: float = 5.0

    def __post_init__(self) -> None:
        if self.max_queued_records < 1:
            raise ConfigError(f"storage.max_queued_records must be at least 1, got {self.max_queued_records}")
        CircuitBreaker(self.failure_limit, self.cooldown_s)


class StorageWorker:
    """Two background threads over one connector, which it owns: `close` closes it."""

    def __init__(self, connector: StorageConnector, config: StorageWorkerConfig | None = None) -> None:
        """Start the threads.

        Args:
            connector: any backend, open. Nobody else closes it.
            config: bounds.
        """
        self._connector, self._counters = connector, Counters()
        config = config or StorageWorkerConfig()
        self._puts = _Lane("put", config, self._counters)
        self._gets = _Lane("get", config, self._counters)

    def submit_put(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float, wait_s: float = 0.0
    ) -> StorageTicket[PutOutcome]:
        """Store records in the background.

        Args:
            digests, buffers: as StorageConnector.put takes them; buffers stay unchanged until the ticket is settled.
            deadline_s: absolute; what is not stored by then counts as TIMEOUT.
            wait_s: back-pressure: how long to wait for room in the queue; 0 drops at once.

        Raises:
            InvariantError: the arguments do not fit together (the caller's bug).
        """
        check_batch(digests, buffers, self._connector.record_bytes, writable=False)

        def run(deadline_s: float) -> tuple[PutOutcome, ...]:
            return self._connector.put(digests, buffers, deadline_s)

        return self._puts.submit("put", PutOutcome, len(digests), run, deadline_s, wait_s)

    def submit_get(
        self, digests: Sequence[bytes], buffers: Sequence[Buffer], deadline_s: float
    ) -> StorageTicket[GetOutcome]:
        """Read records in the background. The buffers belong to the read until the ticket is settled. Raises as put."""
        check_batch(digests, buffers, self._connector.record_bytes, writable=True)

        def run(deadline_s: float) -> tuple[GetOutcome, ...]:
            return self._connector.get_into(digests, buffers, deadline_s)

        return self._gets.submit("get", GetOutcome, len(digests), run, deadline_s, 0.0)

    @property
    def num_queued_records(self) -> int:
        """Records that wait, in both lanes."""
        return self._puts.num_queued + self._gets.num_queued

    def breaker_states(self) -> dict[str, str]:
        """State of each lane's breaker: closed, open or half_open."""
        return {"put": self._puts.breaker_state.value, "get": self._gets.breaker_state.value}

    def counters(self) -> dict[str, int]:
        """The connector's counters, and worker_<verb>_<outcome> for batches that never reached it or ended too late;
        worker_exceptions; breaker_openings."""
        openings = self._puts.num_openings + self._gets.num_openings
        return {**self._connector.counters(), **self._counters.snapshot(), "breaker_openings": openings}

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        return self._counters.last_error or self._connector.last_error()

    def close(self, *, drain: bool, deadline_s: float | None = None) -> bool:
        """Stop, and close the connector.

        Args:
            drain: carry out what is queued first, as far as the deadline allows. What is left is DROPPED.
            deadline_s: absolute; None is ten seconds from now.

        Returns:
            Whether everything stopped. False: the backend is stuck in a call; the thread and the connector are left
            to it, and tickets of that call are not settled.
        """
        deadline_s = deadline_in(10.0) if deadline_s is None else deadline_s
        lanes = (self._puts, self._gets)
        for lane in lanes:
            lane.stop(drain)
        stopped = [lane.join(deadline_s) for lane in lanes]
        if all(stopped):
            self._connector.close()
        return all(stopped)


@dataclass(slots=True, eq=False)
class _Job:
    """A batch in a lane's queue."""

    verb: str
    kind: type[PutOutcome] | type[GetOutcome]
    ticket: StorageTicket[Any]
    run: Callable[[float], tuple[Any, ...]]

    def all_of(self, outcome: str) -> tuple[Any, ...]:
        return (self.kind(outcome),) * self.ticket.num_records


class _Lane:
    """One thread, its queue and its breaker. `_changed` guards everything here and in the lane's tickets."""

    def __init__(self, name: str, config: StorageWorkerConfig, counters: Counters) -> None:
        self._max_queued, self._counters = config.max_queued_records, counters
        self._breaker = CircuitBreaker(config.failure_limit, config.cooldown_s)
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._running: _Job | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._loop, name=f"fastkv-storage-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        verb: str,
        kind: type[OutcomeT],
        num_records: int,
        run: Callable[[float], tuple[OutcomeT, ...]],
        deadline_s: float,
        wait_s: float,
    ) -> StorageTicket[OutcomeT]:
        """Queue a batch, or answer why not with a finished ticket."""
        ticket = StorageTicket(num_records, deadline_s, kind("timeout"), self._changed)
        with self._changed:
            limit_s = min(deadline_s, time.monotonic() + wait_s)
            while (refusal := self._refusal(num_records)) == "dropped" and time.monotonic() < limit_s:
                self._changed.wait(seconds_left(limit_s))
            if refusal:
                self._counters.add(f"worker_{verb}_{refusal}", num_records)
                return finished(kind(refusal), num_records)
            self._queue.append(_Job(verb, kind, ticket, run))
            self._changed.notify_all()
        return ticket

    @property
    def num_queued(self) -> int:
        """Records in the queue, those of expired batches included until they are found."""
        with self._changed:
            return sum(job.ticket.num_records for job in self._queue)

    @property
    def breaker_state(self) -> BreakerState:
        """State of the breaker."""
        with self._changed:
            return self._breaker.state

    @property
    def num_openings(self) -> int:
        """How often the breaker opened."""
        with self._changed:
            return self._breaker.num_openings

    def stop(self, drain: bool) -> None:
        """Take nothing more; without drain, drop what is queued."""
        with self._changed:
            self._is_stopping = True
            if not drain:
                self._drop_queue()
            self._changed.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Wait for the thread; what is still queued at the deadline is dropped. Whether the thread ended."""
        self._thread.join(seconds_left(deadline_s))
        if self._thread.is_alive():
            with self._changed:
                self._drop_queue()
        return not self._thread.is_alive()

    def _refusal(self, num_records: int) -> str:
        """Why a batch cannot be queued now: "unavailable", "dropped", or "" if it can."""
        is_stuck = self._running is not None and time.monotonic() >= self._running.ticket.deadline_s
        if self._is_stopping or is_stuck or self._breaker.state is BreakerState.OPEN:
            return "unavailable"
        queued = sum(job.ticket.num_records for job in self._queue)
        if queued and queued + num_records > self._max_queued:
            self._drop_expired()
            queued = sum(job.ticket.num_records for job in self._queue)
        return "dropped" if queued and queued + num_records > self._max_queued else ""

    def _loop(self) -> None:
        while (job := self._take()) is not None:
            error: BaseException | None = None
            try:
                outcomes = job.run(job.ticket.deadline_s)
                if len(outcomes) != job.ticket.num_records:
                    raise InvariantError(
                        f"{job.ticket.num_records} records, but the backend gave {len(outcomes)} outcomes"
                    )
            except Exception as caught:  # the top of a thread: it goes into the ticket
                outcomes, error = job.all_of("failed"), caught
                self._counters.fault("worker_exceptions", f"{type(caught).__name__}: {caught}")
            self._end(job, outcomes, error)

    def _take(self) -> _Job | None:
        """The next batch to run; None when the lane has stopped. Refuses what must not run."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._is_stopping)
                if not self._queue:
                    return None
                job = self._queue.popleft()
                self._changed.notify_all()  # there is room
                if job.ticket.has_expired:
                    self._counters.add(f"worker_{job.verb}_timeout", job.ticket.num_records)
                elif not self._breaker.try_begin():
                    self._counters.add(f"worker_{job.verb}_unavailable", job.ticket.num_records)
                    job.ticket.finish(job.all_of("unavailable"))
                elif job.ticket.begin():
                    self._running = job
                    return job
                else:  # it expired between the two questions
                    self._breaker.cancel()

    def _end(self, job: _Job, outcomes: tuple[Any, ...], error: BaseException | None) -> None:
        is_late = time.monotonic() >= job.ticket.deadline_s
        bad = (job.kind("failed"), job.kind("timeout"))
        with self._changed:
            self._running = None
            if is_late:
                self._counters.add(f"worker_{job.verb}_timeout", job.ticket.num_records)
            if is_late or any(outcome in bad for outcome in outcomes):
                self._breaker.fail()
            else:
                self._breaker.succeed()
            job.ticket.finish(outcomes, error)

    def _drop_expired(self) -> None:
        expired = [job for job in self._queue if job.ticket.has_expired]
        for job in expired:
            self._queue.remove(job)
            self._counters.add(f"worker_{job.verb}_timeout", job.ticket.num_records)

    def _drop_queue(self) -> None:
        while self._queue:
            job = self._queue.popleft()
            self._counters.add(f"worker_{job.verb}_dropped", job.ticket.num_records)
            job.ticket.finish(job.all_of("dropped"))
