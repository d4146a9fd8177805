"""The batcher over two ranks: a step that reads loaded blocks counts only if every rank has them."""

from __future__ import annotations

import numpy as np
import pytest

from fastkv.core.messages import Poll, PollResult, SamplingParams, StepPlan, StepResult, pack
from fastkv.core.spec import Level
from fastkv.core.transfers import TransferAck, TransferFailure, TransferPlan
from fastkv.engine.batcher import Batcher, Request
from fastkv.scheduler.manager import CacheManager
from fastkv.scheduler.tier_options import TierOptions
from fastkv.scheduler.tiers import TierManager

PROMPT = np.arange(9, dtype=np.int32)


def request(name: str) -> Request:
    return Request(name, PROMPT, SamplingParams(), max_tokens=1)


def prompt_tokens(batcher: Batcher, plan: StepPlan | Poll) -> int:
    assert isinstance(plan, StepPlan)
    return batcher.step_size()[0]


def batcher_with_blocks_on_the_host() -> Batcher:
    manager = CacheManager(8, 4, num_host_blocks=8)
    batcher = Batcher(manager, 4, 64, 64, TierManager(manager, TierOptions(num_ranks=2)))
    batcher.add(request("a"))
    step = batcher.plan()
    assert prompt_tokens(batcher, step) == 9
    assert len(batcher.apply(StepResult(step.plan_id, pack([5]), 0.0))) == 1
    poll = batcher.poll(0.0)
    (offload,) = poll.transfers
    batcher.apply_poll(PollResult(poll.plan_id, tuple(TransferAck(offload.plan_id, rank) for rank in (0, 1))))
    batcher.tiers.forget_device()
    return batcher


def failed(plan: TransferPlan, rank: int) -> TransferAck:
    return TransferAck(plan.plan_id, rank, TransferFailure(0, Level.HOST, Level.DEVICE, (0,), 0, "broken"))


@pytest.mark.parametrize("other", ["fails", "is late"])
def test_step_whose_load_landed_on_one_of_two_ranks_is_discarded_and_computed_again(other: str) -> None:
    """Kind "failed load": the rank that answers has its blocks and computed on them, the other one has not."""
    batcher = batcher_with_blocks_on_the_host()
    batcher.add(request("b"))
    step = batcher.plan()
    assert prompt_tokens(batcher, step) == 1
    (load,) = step.transfers
    acks = (TransferAck(load.plan_id, 0), failed(load, 1))[: 2 if other == "fails" else 1]
    assert batcher.apply(StepResult(step.plan_id, pack([7]), 0.0, acks)) == []
    again = batcher.plan()
    assert prompt_tokens(batcher, again) == 9  # without the host's blocks
    late = () if other == "fails" else (TransferAck(load.plan_id, 1),)
    (token,) = batcher.apply(StepResult(again.plan_id, pack([5]), 0.0, late))
    assert (token.token, token.is_last) == (5, True)
    assert batcher.manager.stats().held == 0
    batcher.manager.check_integrity()


def test_step_whose_load_landed_on_both_ranks_counts() -> None:
    batcher = batcher_with_blocks_on_the_host()
    batcher.add(request("b"))
    step = batcher.plan()
    (load,) = step.transfers
    acks = tuple(TransferAck(load.plan_id, rank) for rank in (1, 0))
    (token,) = batcher.apply(StepResult(step.plan_id, pack([7]), 0.0, acks))
    assert token.token == 7
    assert token.request.hit_tokens == 8


def test_step_that_the_worker_discarded_is_computed_again_even_if_its_load_landed_meanwhile() -> None:
    batcher = batcher_with_blocks_on_the_host()
    batcher.add(request("b"))
    step = batcher.plan()
    (load,) = step.transfers
    acks = tuple(TransferAck(load.plan_id, rank) for rank in (0, 1))
    assert batcher.apply(StepResult(step.plan_id, b"", 0.0, acks, is_discarded=True)) == []
    again = batcher.plan()
    (token,) = batcher.apply(StepResult(again.plan_id, pack([5]), 0.0))
    assert (token.token, token.request.output) == (5, [5])
    batcher.manager.check_integrity()
