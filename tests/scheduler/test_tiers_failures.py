"""TierManager when something is under way or goes wrong: copies in flight, failed loads, lost and late ranks, leaks."""

from __future__ import annotations

import pytest
from helpers.tier_world import TierWorld, counts, text, world

from fastkv.core.spec import Level
from fastkv.core.transfers import TransferAck, TransferFailure
from fastkv.errors import InvariantError, RequestError


def load_under_way(**options: object) -> TierWorld:
    """Request "c" is being given what "a" computed and "b" has pushed out to the host."""
    one = world(num_device=4, num_host=8, **options)  # type: ignore[arg-type]
    one.run("a", text(1, 3))
    one.run("b", text(2, 3))
    one.open("c", text(1, 3))
    assert one.start("c")
    return one


# -- in flight ----------------------------------------------------------------------------------------------------


def test_in_flight_offload_survives_release_eviction_and_reset() -> None:
    """Kind "in flight": pause a copy; neither source nor destination is reused until it is acknowledged."""
    one = world(num_device=4, num_host=4)
    one.open("a", text(1, 3))
    one.start("a")
    one.finish("a")
    one.send()
    one.release("a")
    assert counts(one, Level.DEVICE) == (1, 0, 3)
    assert counts(one, Level.HOST) == (1, 0, 3)
    one.open("b", text(2, 3))
    assert not one.start("b")  # only one block is free: nothing that is being copied is evicted
    assert one.manager.match("b").num_tokens == 0
    one.release("b")
    one.manager.reset()
    one.manager.check_integrity()
    assert counts(one, Level.DEVICE) == (1, 0, 3)
    one.carry_out(0)
    one.check_idle()
    assert counts(one, Level.DEVICE)[0] == 4  # the reset counted
    assert one.run("a again", text(1, 3)) == 0


def test_in_flight_load_outlives_its_request_and_keeps_its_blocks() -> None:
    one = load_under_way()
    table = one.manager.block_table("c").tolist()
    one.release("c")  # aborted while its blocks are being written
    one.open("d", text(3, 0))
    assert one.start("d")
    assert not set(one.manager.block_table("d").tolist()) & set(table[:3])
    one.open("e", text(1, 3))
    assert one.manager.match("e").num_device_tokens == 0  # not readable before it has landed
    one.manager.preempt("e")
    one.carry_out(0)
    found = one.manager.match("e")
    assert found.num_device_tokens == 12  # the bytes are right, so they are not thrown away
    one.expect_content("e", found.device_blocks.tolist(), [])
    for name in ("d", "e"):
        one.release(name)
    one.check_idle()


def test_publish_before_a_load_has_landed_is_refused() -> None:
    one = load_under_way()
    with pytest.raises(RequestError, match="waits for blocks from the host"):
        one.manager.publish("c", 13)
    with pytest.raises(RequestError, match="being loaded already"):
        one.tiers.load(["c"])
    one.settle()
    assert one.finish("c")
    one.release("c")
    one.settle()
    one.check_idle()


def test_load_without_room_for_it_is_refused() -> None:
    one = world(num_device=4, num_host=8)
    one.run("a", text(1, 3))
    one.run("b", text(2, 3))
    one.open("c", text(1, 3))
    one.manager.match("c")
    with pytest.raises(RequestError, match="allocate room"):
        one.tiers.load(["c"])
    one.release("c")
    one.check_idle()


# -- failures -----------------------------------------------------------------------------------------------------


def test_failed_load_recomputes_and_the_host_copy_is_still_there() -> None:
    """Kind "failed load": the request computes from the last good block; the books are as if nothing had been asked."""
    one = load_under_way()
    one.carry_out(0, fail_at=1)
    assert not one.finish("c")
    assert counts(one, Level.HOST) == (2, 6, 0)
    assert one.start("c")  # without the host
    assert one.jobs["c"].cached == 0
    assert one.finish("c")
    one.release("c")
    one.settle()
    one.run("b again", text(2, 3))
    assert one.run("d", text(1, 3)) == 12  # from the host: the failure was not its fault
    one.check_idle()


def test_failed_offload_leaves_the_books_as_they_were() -> None:
    one = world()
    one.open("a", text(1, 3))
    one.start("a")
    one.finish("a")
    one.send()
    one.carry_out(0, fail_at=2)
    assert counts(one, Level.HOST) == (8, 0, 0)
    one.release("a")
    assert one.tiers.stats.offloaded_blocks == 0
    assert one.run("b", text(1, 3)) == 12  # still on the device
    assert one.tiers.stats.offloaded_blocks == 3  # offered again by the next request that has it
    one.check_idle()


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_that_fails_fails_the_plan_for_all(culprit: int) -> None:
    one = world(num_ranks=2)
    one.open("a", text(1, 3))
    one.start("a")
    one.finish("a")
    one.send()
    one.carry_out(1 - culprit)
    one.carry_out(culprit, fail_at=0)
    one.release("a")
    assert one.tiers.stats.offloaded_blocks == 0
    assert counts(one, Level.HOST) == (8, 0, 0)
    one.check_idle()


def test_rank_that_stalls_fails_the_plan_at_its_deadline_and_keeps_the_blocks_until_it_answers() -> None:
    one = load_under_way(num_ranks=2, transfer_timeout_s=3.0)
    one.carry_out(0)
    one.now += 3
    one.tiers.expire()
    assert one.tiers.stats.failed_plans == 1
    assert "ranks [1] did not acknowledge in time" in one.tiers.stats.last_cause
    assert not one.finish("c")
    assert counts(one, Level.DEVICE) == (1, 0, 3)  # rank 1 may still be writing to them
    one.carry_out(1)
    assert one.tiers.stats.failed_plans == 1
    assert one.tiers.stats.loaded_blocks == one.tiers.stats.offloaded_blocks - 6 == 0
    assert counts(one, Level.DEVICE) == (4, 0, 0)
    one.release("c")
    one.check_idle()


def test_rank_that_dies_fails_what_waited_for_it_and_the_others_go_on() -> None:
    one = world(num_device=4, num_host=8, num_ranks=2)
    one.run("a", text(1, 3))
    one.open("b", text(2, 3))
    one.start("b")
    one.finish("b")
    one.send()
    one.carry_out(0)
    one.lose(1)
    assert "rank 1 is lost" in one.tiers.stats.last_cause
    one.release("b")
    one.check_idle()
    assert one.run("c", text(3, 3)) == 0
    assert one.tiers.stats.offloaded_blocks == 6  # of the ranks that are left
    one.check_idle()


def test_acknowledgement_of_a_plan_that_does_not_wait_for_it_is_refused() -> None:
    one = world(num_ranks=2)
    one.open("a", text(1, 3))
    one.start("a")
    one.finish("a")
    one.send()
    plan = one.ranks[0].inbox[0]
    one.carry_out(0)
    failure = TransferFailure(0, Level.DEVICE, Level.HOST, (), -1, "late")
    for ack in (
        TransferAck(plan.plan_id, 0),
        TransferAck(plan.plan_id, 0, failure),
        TransferAck(plan.plan_id, 2),
        TransferAck(99, 0),
    ):
        with pytest.raises(InvariantError, match="does not wait for it"):
            one.tiers.acknowledge([ack])
    one.carry_out(1)
    one.release("a")
    assert one.tiers.stats.offloaded_blocks == 3
    one.check_idle()


def test_leaks_a_hundred_failures_and_aborts_leave_counts_as_at_the_start() -> None:
    """Kind "leaks": exceptions in copies, aborts while copying, match then no room."""
    one = world(num_device=5, num_host=6, has_storage=True)
    one.run("seed", text(0, 4))
    before = counts(one, Level.DEVICE), counts(one, Level.HOST)
    for i in range(100):
        one.open(f"x{i}", text(0, 3) + text(i + 1, 1))
        one.tiers.fetch(f"x{i}")
        if one.start(f"x{i}") and i % 2:
            one.finish(f"x{i}")
        one.send()
        while one.ranks[0].inbox:
            one.carry_out(0, fail_at=i % 3)
        one.release(f"x{i}")
        one.settle()
    one.check_idle()
    after = counts(one, Level.DEVICE), counts(one, Level.HOST)
    assert [sum(level) for level in after] == [sum(level) for level in before]
