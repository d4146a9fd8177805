"""CircuitBreaker: stops asking a backend that keeps failing, so that its time-outs are not paid by every request.

Owned by a lane of StorageWorker and by DeadlineLookup, called under their locks.

    CLOSED --failure_limit failures in a row--> OPEN --cooldown_s later--> HALF_OPEN: one probe is let through
       ^------------------- the probe succeeds --------------------------------'   it fails: OPEN again
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from fastkv.errors import ConfigError


class BreakerState(str, Enum):
    """Whether the backend is asked."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Counts failures in a row. Not thread-safe: its owner holds a lock."""

    def __init__(self, failure_limit: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            failure_limit: failures in a row that open it.
            cooldown_s: how long it stays open before one probe is tried.
            clock: seconds, monotonic.

        Raises:
            ConfigError: failure_limit below 1 or negative cooldown_s.
        """
        if failure_limit < 1 or not cooldown_s >= 0:
            raise ConfigError(
                f"a circuit breaker needs failure_limit of at least 1 and cooldown_s of at least 0, "
                f"got {failure_limit} and {cooldown_s}"
            )
        self._failure_limit, self._cooldown_s, self._clock = failure_limit, cooldown_s, clock
        self._failures = 0
        self._opened_s = 0.0
        self._is_open = False
        self._is_probing = False
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        """The state now. Asking changes nothing."""
        if not self._is_open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() - self._opened_s >= self._cooldown_s else BreakerState.OPEN

    def try_begin(self) -> bool:
        """Whether a call may go to the backend. A True in HALF_OPEN is the probe: report its end, or `cancel` it."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            if self._is_probing:
                return False
            self._is_probing = True
        return state is not BreakerState.OPEN

    def cancel(self) -> None:
        """The call that `try_begin` allowed was not made after all."""
        self._is_probing = False

    def succeed(self) -> None:
        """A call ended well."""
        self._failures, self._is_open, self._is_probing = 0, False, False

    def fail(self) -> None:
        """A call failed or took too long."""
        self._failures += 1
        if self._is_open or self._failures >= self._failure_limit:
            self.num_openings += not self._is_open
            self._is_open, self._opened_s = True, self._clock()
        self._is_probing = False
