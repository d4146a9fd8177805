"""StorageTicket: completion of a batch that StorageWorker carries out in the background.

Made by a lane, held by whoever submitted. Two things end at two times:

    QUEUED --the lane takes it--> RUNNING --> DONE                  outcomes known and buffers free, together
       |                             '--deadline--> EXPIRED --> EXPIRED and settled, when the backend lets go
       '--deadline, close, refused--> outcomes known and buffers free, together

A caller never waits past the deadline. But while a backend hangs, it may still read from or write to the buffers:
they must not be reused before `is_settled`. Outcomes, once given, never change.
"""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

from fastkv.storage.base import seconds_left

Outcome = TypeVar("Outcome")


class StorageTicket(Generic[Outcome]):
    """A batch on its way."""

    def __init__(
        self, num_records: int, deadline_s: float, expired: Outcome, condition: threading.Condition | None = None
    ) -> None:
        """Made by a lane. The condition is shared by the lane's tickets."""
        self.num_records = num_records
        self.deadline_s = deadline_s
        self.error: BaseException | None = None
        self._expired = expired
        self._outcomes: tuple[Outcome, ...] | None = None
        self._is_settled = self._is_running = False
        self._changed = condition or threading.Condition()

    def poll(self) -> tuple[Outcome, ...] | None:
        """An outcome for each record, or None while it is under way and before its deadline. Never blocks."""
        with self._changed:
            self._expire_if_due()
            return self._outcomes

    def wait(self) -> tuple[Outcome, ...]:
        """The outcomes, at the latest at the deadline. What is not known by then is TIMEOUT for good."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcomes is not None, seconds_left(self.deadline_s))
            if self._outcomes is None:
                self._expire()
            assert self._outcomes is not None
            return self._outcomes

    @property
    def is_settled(self) -> bool:
        """Whether the buffers may be reused: nobody reads from or writes to them any more."""
        with self._changed:
            self._expire_if_due()
            return self._is_settled

    def wait_settled(self, deadline_s: float) -> bool:
        """Wait until the buffers may be reused; False if they still may not at the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled, seconds_left(min(deadline_s, self.deadline_s)))
            self._expire_if_due()
            return self._changed.wait_for(lambda: self._is_settled, seconds_left(deadline_s))

    # For the lane, which holds the condition.

    def begin(self) -> bool:
        """The lane takes it; False if it expired in the queue."""
        self._expire_if_due()
        self._is_running = self._outcomes is None
        return self._is_running

    @property
    def has_expired(self) -> bool:
        """Whether it need not be run any more."""
        self._expire_if_due()
        return self._outcomes is not None

    def finish(self, outcomes: tuple[Outcome, ...], error: BaseException | None = None) -> None:
        """The end, of a batch that ran or never will."""
        self._expire_if_due()
        if self._outcomes is None:
            self._outcomes = outcomes
        if error is not None:
            self.error = error
        self._is_settled, self._is_running = True, False
        self._changed.notify_all()

    def _expire_if_due(self) -> None:
        if self._outcomes is None and time.monotonic() >= self.deadline_s:
            self._expire()

    def _expire(self) -> None:
        self._outcomes = (self._expired,) * self.num_records
        self._is_settled = not self._is_running
        self._changed.notify_all()


def finished(outcome: Outcome, num_records: int) -> StorageTicket[Outcome]:
    """A ticket of a batch that was refused: every record has this outcome."""
    ticket: StorageTicket[Outcome] = StorageTicket(num_records, 0.0, outcome)
    ticket.poll()
    return ticket
