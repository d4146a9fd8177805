"""Ctrl-C at the worst moment: the call ends, and the engine goes on as if it had not been asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from helpers.engine import tiny_config
from helpers.tier_engine import run_rounds, small

from fastkv.core.messages import Poll, PollResult, SetWeightsVersion
from fastkv.engine.batcher import Batcher
from fastkv.engine.interrupts import held_signals, interruptible
from fastkv.engine.llm import LLM
from fastkv.engine.transport import ProcessWorker
from fastkv.errors import WorkerError
from fastkv.scheduler.tiers import TierManager
from fastkv.worker.copy_engine import CopyEngine


@pytest.mark.parametrize(
    ("worker", "owner", "name"),
    [
        ("inline", Batcher, "plan"),
        ("inline", TierManager, "take_plans"),
        ("inline", CopyEngine, "submit"),
        ("inline", CopyEngine, "take_acks"),
        ("process", TierManager, "take_plans"),
        ("process", ProcessWorker, "send"),
        ("process", Connection, "recv_bytes"),
    ],
)
def test_engine_interrupted_right_after_a_call_goes_on_as_before(
    monkeypatch: pytest.MonkeyPatch, worker: str, owner: Any, name: str
) -> None:
    """A plan that was taken and not sent, or an acknowledgement that was read and not booked, kept its blocks for ever:
    "no request can run". A message that was cut cost the worker process."""
    real = getattr(owner, name)
    with LLM(small("write_through"), worker) as llm:
        want = run_rounds(llm)[0]
        for interrupt_at in (1, 2, 4):
            calls = 0

            def interrupted(*args: Any, interrupt_at: int = interrupt_at) -> Any:
                nonlocal calls
                calls += 1
                result = real(*args)
                if calls == interrupt_at:
                    signal.raise_signal(signal.SIGINT)
                return result

            monkeypatch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                run_rounds(llm)
            monkeypatch.setattr(owner, name, real)
            llm.manager.check_integrity()
            assert llm.manager.stats().open_requests == 0
            assert llm._levels.settle(llm._batcher, 10)
            assert llm.manager.stats().held == 0
        assert run_rounds(llm)[0] == want


def test_engine_interrupted_among_many_prompts_reads_no_further() -> None:
    def prompts() -> Iterator[list[int]]:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            read.append(True)
            yield [1, 2, 3]

    class Many(list[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            return prompts()

    read: list[bool] = []
    with LLM(tiny_config()) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(Many())
        assert len(read) == 1
        assert len(llm.generate([[1, 2, 3]], max_tokens=1).outputs) == 1


def test_engine_that_takes_long_to_close_can_be_interrupted_and_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    went_on: list[bool] = []

    def slow(message: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)

    llm = LLM(tiny_config())
    with monkeypatch.context() as patch:
        patch.setattr(llm._transport._worker, "handle", slow)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
    assert not went_on
    llm.close()


def test_worker_process_is_deaf_to_signals_from_its_first_instruction_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends Ctrl-C to both: the worker died with a traceback of its own before the engine could end it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    worker = ProcessWorker(tiny_config(), module="helpers.interrupted_process")
    assert worker.ready.num_device_blocks > 0
    os.kill(worker.pid, signal.SIGINT)
    worker.close()
    assert worker._process.returncode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_message_that_a_stopped_worker_does_not_take_can_be_interrupted_and_goes_before_the_next() -> None:
    """A plan that is larger than the socket's buffer: neither Ctrl-C nor SIGTERM ended the program."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not len(worker._unsent):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    def call() -> None:
        with held_signals():
            worker.call(SetWeightsVersion(1, "x" * (4 << 20)))

    worker = ProcessWorker(tiny_config())
    os.kill(worker.pid, signal.SIGSTOP)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    thread.join()
    assert len(worker._unsent)
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.call(Poll(2, (), 0.0)) == PollResult(2, (), {}, "")
    worker.close()
    assert worker._process.returncode == 0


def test_worker_that_takes_no_message_any_more_is_killed_when_its_time_to_close_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = ProcessWorker(tiny_config())
    real = worker._process.wait
    monkeypatch.setattr(worker._process, "wait", lambda timeout=None: real(timeout and 0.1))
    worker._close_timeout_s = 0.1
    os.kill(worker.pid, signal.SIGSTOP)
    worker.send(SetWeightsVersion(1, "x" * (4 << 20)), time.monotonic())
    with pytest.raises(WorkerError, match=r"did not close within 0.1 s"):
        worker.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_worker_process_whose_engine_is_gone_before_it_said_anything_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "fastkv.engine.worker_process", str(theirs.fileno())]
    with theirs:
        worker = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    ours.close()
    assert worker.communicate(timeout=60)[1] == b""
    assert worker.returncode == 0


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """SIGINTs that reach whoever had the signal before."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGINT, before)


def test_held_signal_comes_at_the_next_interruptible_place_or_at_the_end(heard: list[int]) -> None:
    with held_signals():
        signal.raise_signal(signal.SIGINT)
        assert not heard
        with interruptible():
            assert len(heard) == 1
            signal.raise_signal(signal.SIGINT)
            assert len(heard) == 2
        with held_signals():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # of several that wait, one is raised
        assert len(heard) == 2
    assert len(heard) == 3
    signal.raise_signal(signal.SIGINT)
    assert len(heard) == 4


def test_held_signal_that_is_ignored_stays_ignored(heard: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_signals(), interruptible():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("interrupt_at", [0, 1])
def test_hold_whose_end_is_interrupted_still_gives_all_signals_back(
    monkeypatch: pytest.MonkeyPatch, heard: list[int], interrupt_at: int
) -> None:
    """Ctrl-C right after its handler was back left the other signal with the hold, which nobody asked any more."""
    real, calls = signal.signal, 0

    def interrupted(number: int, handler: Any) -> Any:
        nonlocal calls
        before, calls = real(number, handler), calls + 1
        if calls == 1 + interrupt_at:
            raise KeyboardInterrupt
        return before

    def hold() -> None:
        with held_signals():
            signal.raise_signal(signal.SIGTERM)
            monkeypatch.setattr(signal, "signal", interrupted)

    before = real(signal.SIGTERM, lambda number, _: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            hold()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == mine
        assert heard == [signal.SIGTERM]
    finally:
        real(signal.SIGTERM, before)


def test_hold_that_is_left_behind_passes_signals_on(heard: list[int]) -> None:
    """An interrupt between two steps of the end: the handler that is still there acts for the one before."""
    mine = signal.getsignal(signal.SIGINT)
    with held_signals():
        left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, left)
    signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine


def test_handler_that_is_set_where_signals_may_come_stays(heard: list[int]) -> None:
    others: list[int] = []
    with held_signals():
        with interruptible():
            signal.signal(signal.SIGINT, lambda number, _: others.append(number))
        signal.raise_signal(signal.SIGINT)
        assert not others
    assert (others, heard) == ([signal.SIGINT], [])
    signal.raise_signal(signal.SIGINT)
    assert (others, heard) == ([signal.SIGINT] * 2, [])


def test_hold_in_another_thread_leaves_signals_alone(heard: list[int]) -> None:
    def work() -> None:
        with held_signals(), interruptible():
            done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=work)
    with held_signals():
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGINT)
        assert not heard
    assert (len(heard), done) == (1, [True])
