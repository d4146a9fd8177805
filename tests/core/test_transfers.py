"""Transfer plans as messages: they cross unchanged, and one that cannot be carried out is refused at once."""

from __future__ import annotations

import hashlib

import pytest

from fastkv.core.messages import Poll, PollResult, StepResult, decode, encode
from fastkv.core.spec import Level
from fastkv.core.transfers import TransferAck, TransferFailure, TransferPlan, check_plan, stage_of
from fastkv.errors import InvariantError

DIGESTS = [hashlib.sha256(bytes([i])).digest() for i in range(2)]
OFFLOAD = stage_of(Level.DEVICE, Level.HOST, [3, 1], [0, 2])
LOAD = stage_of(Level.HOST, Level.DEVICE, [1], [3])
PUT = stage_of(Level.HOST, Level.STORAGE, [1, 2], digests=DIGESTS)
GET = stage_of(Level.STORAGE, Level.HOST, destination_ids=[0, 1], digests=DIGESTS)


def test_transfer_plan_crosses_unchanged() -> None:
    plan = TransferPlan(7, (OFFLOAD, LOAD, PUT, GET))
    message = Poll(1, (plan,), 0.25)
    assert decode(encode(message)) == message
    assert plan.stages[0].ids(Level.DEVICE).tolist() == [3, 1]
    assert plan.stages[0].ids(Level.HOST).tolist() == [0, 2]
    assert plan.stages[3].digest_list() == DIGESTS
    assert [stage.num_blocks for stage in plan.stages] == [2, 1, 2, 2]


def test_transfer_ack_carries_level_ids_layer_and_cause() -> None:
    failure = TransferFailure(1, Level.HOST, Level.DEVICE, (4, 5), 3, "TransferError: no")
    acks = (TransferAck(7, 1, failure), TransferAck(8, 0, landed=b"\x01\x00"))
    assert decode(encode(PollResult(1, acks))) == PollResult(1, acks)
    step = StepResult(2, b"", 0.5, acks, is_discarded=True)
    assert decode(encode(step)) == step


def test_transfer_plan_legal_stages_pass_and_know_their_kind() -> None:
    check_plan(TransferPlan(1, (OFFLOAD, LOAD, PUT, GET)), 4, 3)
    assert TransferPlan(1, (OFFLOAD, LOAD)).is_load
    assert not TransferPlan(1, (OFFLOAD, PUT)).is_load


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((), "no stage"),
        ((stage_of(Level.DEVICE, Level.STORAGE, [1], digests=DIGESTS[:1]),), "no neighbours"),
        ((stage_of(Level.HOST, Level.HOST, [1], [2]),), "no neighbours"),
        ((stage_of(Level.DEVICE, Level.HOST, [1, 2], [0]),), "1 HOST ids for 2"),
        ((stage_of(Level.DEVICE, Level.HOST),), "0 DEVICE ids"),
        ((stage_of(Level.DEVICE, Level.HOST, [4], [0]),), "DEVICE ids"),
        ((stage_of(Level.DEVICE, Level.HOST, [-1], [0]),), "DEVICE ids"),
        ((OFFLOAD, stage_of(Level.HOST, Level.DEVICE, [3], [0])), "stage 1: HOST ids"),
        ((stage_of(Level.HOST, Level.DEVICE, [0, 1], [2, 2]),), "twice"),
        ((stage_of(Level.HOST, Level.STORAGE, [0, 1], digests=DIGESTS[:1]),), "as many digests"),
        ((stage_of(Level.HOST, Level.STORAGE, [0], [0], digests=DIGESTS[:1]),), "no storage ids"),
    ],
)
def test_transfer_plan_that_cannot_run_is_refused(stages: tuple, problem: str) -> None:
    with pytest.raises(InvariantError, match=problem):
        check_plan(TransferPlan(1, stages), num_device_blocks=4, num_host_blocks=3)
