"""DeadlineLookup: makes any lookup answer by its deadline, even if the backend hangs inside a call.

Owned by the scheduler side, which asks while a request waits. The wrapped lookup runs on one thread. A call that passes
its deadline answers 0 (a miss, counted) and leaves the thread to it; while the thread is busy with such a call, and
while the circuit breaker is open, the answer is 0 at once. An answer that comes late is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from fastkv.storage.base import Counters, StorageLookup, check_digests, seconds_left
from fastkv.storage.breaker import BreakerState, CircuitBreaker


class _Question:
    """One call on its way to the thread and back."""

    __slots__ = ("answer", "deadline_s", "digests", "is_abandoned")

    def __init__(self, digests: Sequence[bytes], deadline_s: float) -> None:
        self.digests, self.deadline_s = digests, deadline_s
        self.answer: int | None = None
        self.is_abandoned = False


class DeadlineLookup:
    """A StorageLookup over another one, which it owns."""

    def __init__(self, lookup: StorageLookup, failure_limit: int = 3, cooldown_s: float = 5.0) -> None:
        """
        Args:
            lookup: any backend's.
            failure_limit: failures and time-outs in a row after which it is not asked for a while.
            cooldown_s: that while.

        Raises:
            ConfigError: failure_limit below 1 or negative cooldown_s.
        """
        self._lookup, self._counters = lookup, Counters()
        self._breaker = CircuitBreaker(failure_limit, cooldown_s)
        self._changed = threading.Condition()
        self._question: _Question | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="fastkv-storage-lookup", daemon=True)
        self._thread.start()

    def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
        """As StorageLookup.contains, and never later than deadline_s."""
        check_digests(digests)
        with self._changed:
            is_free = self._changed.wait_for(lambda: self._question is None or self._is_stuck, seconds_left(deadline_s))
            if self._is_closed or not is_free or self._question is not None or not self._breaker.try_begin():
                self._counters.add("lookup_refused")
                return 0
            question = self._question = _Question(digests, deadline_s)
            self._changed.notify_all()
            self._changed.wait_for(lambda: question.answer is not None, seconds_left(deadline_s))
            if question.answer is None:
                question.is_abandoned = True
                self._counters.add("lookup_abandoned")
                self._breaker.fail()
                self._changed.notify_all()
                return 0
            return question.answer

    def counters(self) -> dict[str, int]:
        """The lookup's counters; lookup_abandoned (late), lookup_refused (not asked), lookup_exceptions."""
        return {**self._lookup.counters(), **self._counters.snapshot()}

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        return self._counters.last_error or self._lookup.last_error()

    @property
    def breaker_state(self) -> BreakerState:
        """Whether the lookup is asked."""
        with self._changed:
            return self._breaker.state

    def close(self) -> None:
        """Stop; closes the lookup unless it is stuck in a call, which is then left to its thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_busy = self._question is not None
        self._thread.join(0.1 if is_busy else None)
        if not self._thread.is_alive():
            self._lookup.close()

    @property
    def _is_stuck(self) -> bool:
        return self._question is not None and self._question.is_abandoned

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._question is not None or self._is_closed)
                question = self._question
                if question is None:
                    return
            answer, is_well = 0, False
            try:
                answer = self._lookup.contains(question.digests, question.deadline_s)
                is_well = time.monotonic() < question.deadline_s
            except Exception as error:  # the top of a thread: a fault is a miss and a counter
                self._counters.fault("lookup_exceptions", f"{type(error).__name__}: {error}")
            with self._changed:
                question.answer, self._question = answer, None
                if is_well:
                    self._breaker.succeed()
                elif not question.is_abandoned:  # else it has been counted
                    self._breaker.fail()
                self._changed.notify_all()
