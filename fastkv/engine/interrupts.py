"""Ctrl-C and SIGTERM where they can do no harm.

Python raises an interrupt between any two instructions of the main thread: between taking a plan and sending it, or
between reading an acknowledgement and booking it, where the blocks that it is about would stay in use for ever. So
whoever has books to keep holds the signals, and lets them in where nothing is half done: while it waits or computes.

    with held_signals():            # what comes meanwhile is raised at the end ...
        ...
        with interruptible():       # ... or here
            ...

Called by the engine, the command line and the import of Paddle. Does nothing in other threads: Python interrupts the
main thread only. What keeps other threads out of the books is `in_turn`.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Hold:
    """Signals that are held, and who gets them in the end."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._came: list[int] = []

    def begin(self) -> None:
        """Note signals from now on; those that are ignored stay so."""
        for number in _SIGNALS:
            handler = signal.getsignal(number)  # now: who was let in may have set another
            if handler is not signal.SIG_IGN:
                self._before[number] = signal.SIG_DFL if handler is None else handler
                signal.signal(number, functools.partial(self._handle, self._before[number]))

    def end(self) -> None:
        """Give the signals back to whoever had them, and raise the first that came.

        One that comes meanwhile may be raised in the middle. The rest is done all the same; should it come between two
        steps of that, `_handle` makes up for what is left.
        """
        before, self._before = self._before, {}
        with contextlib.ExitStack() as ends:  # in reverse order
            ends.callback(self._raise_first)
            for number, handler in before.items():
                ends.callback(signal.signal, number, handler)

    def _handle(self, before: Any, number: int, frame: object) -> None:
        if number in self._before:
            self._came.append(number)
        else:  # the end has begun
            signal.signal(number, before)
            signal.raise_signal(number)

    def _raise_first(self) -> None:
        came, self._came = self._came, []
        if came:
            signal.raise_signal(came[0])


_innermost: _Hold | None = None


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from what is inside, and what is inside from them; one that came is raised at the end."""
    global _innermost
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, _innermost = _innermost, _Hold()
    try:
        _innermost.begin()
        yield
    finally:
        hold, _innermost = _innermost, outer
        hold.end()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside `held_signals`: signals may come here. Elsewhere they may anyway."""
    hold = _innermost
    if hold is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        hold.end()
        yield
    finally:
        hold.begin()


def let_signals_in() -> None:
    """Inside `held_signals`: what came is raised here."""
    with interruptible():
        pass


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """SIGINT and SIGTERM wait in the system, and a process that is started inside never gets them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_turn(method: _Method) -> _Method:
    """A method during which signals are held, and which other threads wait for: its object has an RLock, `turn`."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self.turn, held_signals():
            return method(self, *args, **options)

    return cast("_Method", call)
