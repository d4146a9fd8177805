"""The circuit breaker, on a clock of our own."""

from __future__ import annotations

import pytest

from fastkv.errors import ConfigError
from fastkv.storage.breaker import BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(3, 5.0, Clock())
    for _ in range(2):
        breaker.fail()
    breaker.succeed()
    for _ in range(2):
        breaker.fail()
    assert breaker.state is BreakerState.CLOSED
    breaker.fail()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.try_begin()
    assert breaker.num_openings == 1


def test_breaker_lets_one_probe_through_after_the_cooldown() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.fail()
    clock.now_s += 4.9
    assert not breaker.try_begin()
    clock.now_s += 0.2
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.try_begin()
    assert not breaker.try_begin()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.try_begin()


def test_breaker_probe_that_fails_opens_it_for_another_cooldown() -> None:
    clock = Clock()
    breaker = CircuitBreaker(3, 5.0, clock)
    for _ in range(3):
        breaker.fail()
    clock.now_s += 6
    assert breaker.try_begin()
    breaker.fail()
    assert breaker.state is BreakerState.OPEN
    clock.now_s += 4
    assert not breaker.try_begin()
    clock.now_s += 2
    assert breaker.try_begin()
    assert breaker.num_openings == 1


def test_breaker_probe_that_was_not_made_can_be_made_again() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.fail()
    clock.now_s += 6
    assert breaker.try_begin()
    breaker.cancel()
    assert breaker.try_begin()


@pytest.mark.parametrize(("limit", "cooldown_s"), [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_breaker_nonsense_is_refused(limit: int, cooldown_s: float) -> None:
    with pytest.raises(ConfigError, match="failure_limit"):
        CircuitBreaker(limit, cooldown_s)
