"""The engine's levels under faults: the Nth copy or the Nth call of storage fails, stalls or corrupts, for every N."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.copies import FaultyCopier
from helpers.storage_faults import Fault, FaultyConnector
from helpers.tier_engine import POLICIES, PROMPTS, ROUNDS, moved, run_rounds, small, unbounded_text

from fastkv import TransferError
from fastkv.engine import llm as llm_module
from fastkv.engine.llm import LLM
from fastkv.storage import FileConnector
from fastkv.worker import controller as controller_module
from fastkv.worker import storage_access


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return unbounded_text()


def faulty_copies(monkeypatch: pytest.MonkeyPatch, at: int, what: str, stall_s: float = 30.0) -> list[FaultyCopier]:
    made: list[FaultyCopier] = []
    real = controller_module.RecordCopier

    def make(*args: Any) -> FaultyCopier:
        made.append(FaultyCopier(real(*args), at, what, stall_s))
        return made[-1]

    monkeypatch.setattr(controller_module, "RecordCopier", make)
    return made


def faulty_storage(monkeypatch: pytest.MonkeyPatch, fault: Fault, at: int) -> list[FaultyConnector]:
    made: list[FaultyConnector] = []
    real: Callable[..., FileConnector] = storage_access.open_connector  # type: ignore[assignment]

    def open_faulty(*args: Any) -> FaultyConnector:
        made.append(FaultyConnector(real(*args), fault, at, stall_s=0.1))
        return made[-1]

    monkeypatch.setattr(storage_access, "open_connector", open_faulty)
    return made


@pytest.mark.parametrize(
    ("policy", "what"),
    [("write_through", "fail"), ("write_through_selective", "scribble"), ("write_back", "scribble")],
)
def test_copy_that_fails_at_every_call_changes_no_text(
    expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, policy: str, what: str
) -> None:
    """Kinds "failed load" and "leaks": the Nth copy of a scenario fails, for every N."""
    places = [[0, 1, 2], [0, 1, 2], [3, 4], [0, 1]]
    rounds = [[PROMPTS[i] for i in one] for one in places]
    wanted = [expected["none"][-5:][i] for one in places for i in one]
    with monkeypatch.context() as patch:
        counting = faulty_copies(patch, -1, what)
        with LLM(small(policy)) as llm:
            run_rounds(llm, rounds)
        num_calls = counting[0].calls
    assert num_calls > 5
    failed = 0
    for nth in range(num_calls):
        with monkeypatch.context() as patch:
            faulty_copies(patch, nth, what)
            with LLM(small(policy)) as llm:
                tokens, generations = run_rounds(llm, rounds)
                assert llm.manager.stats().held == 0
                now = moved(generations, "failed_transfers")
                assert ("rank 0" in generations[-1].report.transfer_error) == (now > 0), "a failure without its cause"
                failed += now
        assert tokens == wanted, nth
    assert failed >= num_calls - 3  # a scenario may take another turn after a failure, and end before its Nth copy


def test_copy_that_stalls_past_its_deadline_discards_the_step_and_the_late_end_harms_nothing(
    expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = faulty_copies(monkeypatch, -1, "stall")
    with LLM(small(transfer_timeout_s=0.2, num_device_blocks=40)) as llm:
        run_rounds(llm, ROUNDS[:2])
        made[0].at, made[0].calls = 0, 0  # the next copy, a load, stalls
        start = time.monotonic()
        generation = llm.generate(ROUNDS[2], max_tokens=6)
        assert made[0].stalled.is_set()
        assert time.monotonic() - start < 20
        assert [output.token_ids for output in generation.outputs] == expected["none"][5:7]
        assert generation.report.moved.failed_transfers == 0  # not yet: the manager waits longer than the worker
        made[0].resume.set()
        tokens, _ = run_rounds(llm, ROUNDS[3:])
        assert tokens == expected["none"][7:]
        assert llm.manager.stats().held == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_copy_that_stalls_past_its_deadline_at_every_call_changes_no_text(
    expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The Nth copy ends three deadlines late, for every N: by then its step has been computed without it."""
    rounds = [PROMPTS[:3], PROMPTS[3:], PROMPTS[:2]]
    nth = 0
    while True:
        with monkeypatch.context() as patch:
            made = faulty_copies(patch, nth, "stall", stall_s=0.15)
            with LLM(small(policy, transfer_timeout_s=0.05)) as llm:
                tokens, _ = run_rounds(llm, rounds)
                llm.sleep()  # waits for what is still under way
                assert llm.manager.stats().held == 0, nth
                llm.manager.check_integrity()
        assert tokens == expected["none"][:7], nth
        if not made[0].stalled.is_set():
            break
        nth += 1
    assert nth > 1


@pytest.mark.parametrize("fault", list(Fault))
def test_storage_that_fails_at_every_call_changes_no_text(
    expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault
) -> None:
    """A backend that is slow, full, broken or corrupts costs misses and counters, never an error to a request."""
    rounds, wanted = [PROMPTS[:3], PROMPTS[3:], PROMPTS[:2]], expected["none"][:7]
    nth = 0
    while True:
        with monkeypatch.context() as patch:
            made = faulty_storage(patch, fault, nth)
            with LLM(small("write_through", tmp_path / f"{fault.value}-{nth}", num_host_blocks=9)) as llm:
                tokens, _ = run_rounds(llm, rounds)
        assert tokens == wanted, nth
        if not made[0].trigger.has_come:
            break
        assert made[0].counters().get(f"injected_{fault.value}", 1) == 1
        nth += 1
    assert nth > 3


def test_close_while_a_copy_does_not_end_says_so_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = faulty_copies(monkeypatch, -1, "stall")
    llm = LLM(small(transfer_timeout_s=0.2))
    run_rounds(llm, ROUNDS[:1])
    made[0].at = made[0].calls
    monkeypatch.setattr(llm_module, "_SETTLE_S", 0.1)
    llm.generate([PROMPTS[3]], max_tokens=1)
    assert made[0].stalled.is_set()
    with pytest.raises(TransferError, match="cannot free the caches"):
        llm.close()
    assert llm._transport._worker.caches.num_blocks > 0  # type: ignore[union-attr] # memory stays under the copy
    made[0].resume.set()
    llm.close()
    llm.close()
