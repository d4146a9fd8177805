"""TierManager, one scenario a test: what moves when, what new weights and sleep leave, and the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.tier_world import POISON, TierWorld, counts, text, world

from fastkv.core.spec import Level
from fastkv.errors import ConfigError, RequestError
from fastkv.scheduler import CacheManager
from fastkv.scheduler.tier_options import TierOptions, WritePolicy
from fastkv.scheduler.tiers import TierManager

POLICIES = list(WritePolicy)


# -- write policies -----------------------------------------------------------------------------------------------


def test_write_through_copies_a_block_once_it_is_computed() -> None:
    one = world()
    one.run("a", text(1, 3))
    assert one.tiers.stats.offloaded_blocks == 3
    one.run("b", text(1, 3))
    assert one.tiers.stats.offloaded_blocks == 3  # it is there already


def test_write_through_selective_copies_a_block_once_it_was_found_often_enough() -> None:
    one = world(policy=WritePolicy.WRITE_THROUGH_SELECTIVE, write_through_threshold=2)
    one.run("a", text(1, 3))
    one.run("b", text(1, 3)[:5])  # finds block 0
    assert one.tiers.stats.offloaded_blocks == 0
    one.run("c", text(1, 3))  # finds blocks 0 to 2
    assert one.tiers.stats.offloaded_blocks == 1
    one.run("d", text(1, 3))
    assert one.tiers.stats.offloaded_blocks == 3


def test_write_back_copies_a_block_when_it_must_leave_and_loses_nothing() -> None:
    one = world(policy=WritePolicy.WRITE_BACK)
    one.run("a", text(1, 3))
    assert one.tiers.stats.offloaded_blocks == 0
    one.run("b", text(2, 3))
    assert one.tiers.stats.offloaded_blocks == 3
    assert one.run("a again", text(1, 3)) == 12
    assert one.run("b again", text(2, 3)) == 12
    one.check_idle()


def test_write_back_under_way_is_waited_for_instead_of_dropping_another_block() -> None:
    one = world(policy=WritePolicy.WRITE_BACK)
    one.run("a", text(1, 1))
    one.run("b", text(2, 1))
    one.open("c", text(3, 2))
    assert counts(one, Level.DEVICE) == (2, 2, 0)
    assert not one.start("c")  # a is being written back; b must not go in its place
    one.send()
    assert not one.start("c")
    one.carry_out(0)
    assert one.start("c")
    assert one.finish("c")
    one.release("c")
    assert one.run("a again", text(1, 1)) == 4
    assert one.run("b again", text(2, 1)) == 4
    one.check_idle()


def test_write_back_to_a_host_that_is_smaller_than_what_must_leave_goes_on() -> None:
    """Cleaning one block must not evict another that was just cleaned, for ever."""
    one = world(num_device=4, num_host=1, policy=WritePolicy.WRITE_BACK)
    for name in range(5):
        one.run(f"r{name}", text(name, 3))
    one.check_idle()


def test_write_back_that_fails_is_not_tried_for_a_while_and_then_blocks_are_dropped() -> None:
    one = world(policy=WritePolicy.WRITE_BACK)
    one.run("a", text(1, 3))
    one.open("b", text(2, 3))
    assert not one.start("b")
    one.send()
    one.carry_out(0, fail_at=1)
    assert one.tiers.stats.failed_plans == 1
    assert "rank 0: on purpose" in one.tiers.stats.last_cause
    assert counts(one, Level.HOST) == (8, 0, 0)  # as if it had not been asked
    assert counts(one, Level.DEVICE) == (1, 3, 0)
    assert one.start("b")
    assert one.finish("b")
    one.release("b")
    one.now += 2
    assert one.run("c", text(3, 3)) == 0
    assert one.tiers.stats.offloaded_blocks == 3  # tried again
    one.check_idle()


@pytest.mark.parametrize("policy", POLICIES)
def test_copy_order_evict_a_and_load_b_into_its_block(policy: WritePolicy) -> None:
    """Kind "copy order": host holds old A, device holds B, under all three write policies."""
    one = world(num_device=3, num_host=4, policy=policy, write_through_threshold=1)
    a, b = text(1, 2), text(2, 2)
    for round_ in range(3):  # selective needs to find them first
        assert one.run(f"b{round_}", b) in (0, 8)
        one.run(f"b{round_}'", b)
        one.run(f"a{round_}", a)
        one.run(f"a{round_}'", a)
    one.open("again", b)
    found = one.manager.match("again")
    assert (len(found.device_blocks), len(found.host_blocks)) == (0, 2)
    one.manager.preempt("again")
    while not one.start("again"):
        one.settle()
    one.settle()
    assert one.finish("again")
    assert one.jobs["again"].cached == 8
    device = one.manager.block_table("again").tolist()[:2]
    assert [one.ranks[0].device[block] for block in device] == one.digests("again")
    one.open("look", a)
    assert one.manager.match("look").num_tokens == 8  # start checks the bytes themselves
    one.release("look")
    one.release("again")


@pytest.mark.parametrize("policy", POLICIES)
def test_working_set_larger_than_the_device_is_never_computed_twice(policy: WritePolicy) -> None:
    one = world(num_device=5, num_host=40, policy=policy, write_through_threshold=1)
    for round_ in range(4):
        for name in range(6):
            cached = one.run(f"{round_}-{name}", text(name, 4))
            if round_ == 0 or (round_ < 2 and policy is WritePolicy.WRITE_THROUGH_SELECTIVE):
                continue
            if policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
                assert cached == 16
    one.check_idle()


# -- weights ------------------------------------------------------------------------------------------------------


def test_stale_after_update_no_level_finds_anything_and_late_transfers_re_insert_nothing() -> None:
    """Kind "stale after update"."""
    one = world(num_device=8, num_host=8, has_storage=True)
    one.run("a", text(1, 3))
    assert one.tiers.stats.stored_blocks == 3
    one.open("b", text(2, 3))
    one.start("b")
    one.finish("b")
    one.send()  # an offload is under way ...
    one.release("b")
    one.open("c", text(3, 2))
    one.start("c")
    one.finish("c")
    one.release("c")  # ... and one is not sent yet
    one.tiers.set_weights_version("2")
    one.tiers.use_lookup(one)
    assert len(one.tiers.take_plans()) == 0
    one.carry_out(0)
    one.check_idle()
    for name, tokens in (("a2", text(1, 3)), ("b2", text(2, 3)), ("c2", text(3, 2))):
        one.open(name, tokens)
        assert not one.tiers.fetch(name)  # storage: other digests
        assert one.manager.match(name).num_tokens == 0
        one.release(name)
    assert counts(one, Level.DEVICE) == (8, 0, 0)
    assert counts(one, Level.HOST) == (8, 0, 0)
    assert one.run("a3", text(1, 3)) == 0
    assert one.run("a4", text(1, 3)) == 12


def test_stale_after_update_a_plan_that_was_not_sent_is_never_sent() -> None:
    """A fetch of older weights would read, and a store write, under the new version's name."""

    class Everything:
        def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
            return len(digests)

    manager = CacheManager(8, 4, num_host_blocks=8)
    tiers = TierManager(manager, TierOptions(has_storage=True), Everything())
    manager.open("a", text(1, 3))
    assert tiers.fetch("a")
    assert tiers.has_plans
    tiers.set_weights_version("2")
    assert not tiers.has_plans
    assert tiers.take_plans() == ()
    assert not tiers.is_fetching("a")
    assert tiers.num_under_way == 0
    assert manager._counts(int(Level.HOST))[1:4] == (8, 0, 0)
    manager.check_integrity()


def test_sleep_keeps_what_the_host_has_and_forgets_the_rest() -> None:
    one = world(num_device=8, num_host=2)
    one.run("a", text(1, 3))
    one.open("b", text(2, 1))
    one.start("b")
    with pytest.raises(RequestError, match="device blocks are held"):
        one.tiers.forget_device()
    one.release("b")
    one.tiers.forget_device()
    one.ranks[0].device[:] = [POISON] * 8
    assert one.run("c", text(1, 3)) == 8
    one.tiers.forget_device(host_too=True)
    assert one.run("d", text(1, 3)) == 0
    one.check_idle()


# -- bounds and options -------------------------------------------------------------------------------------------


def test_write_behind_takes_at_most_half_of_the_host() -> None:
    """Back-pressure: while storage does not keep up, blocks go to the host and not on to storage."""
    one = world(num_device=20, num_host=8, has_storage=True)
    for name in range(6):
        one.open(f"r{name}", text(name, 2))
        one.start(f"r{name}")
        one.finish(f"r{name}")
        one.release(f"r{name}")
        one.send()
        stores = [plan for plan in one.ranks[0].inbox if plan.stages[0].touches_storage]
        for place, plan in reversed(list(enumerate(one.ranks[0].inbox))):
            if plan not in stores:
                one.carry_out(0, place)
        one.send()
    pending = sum(plan.stages[0].num_blocks for plan in one.ranks[0].inbox)
    assert 4 <= pending <= 6
    assert one.tiers.stats.offloaded_blocks == 12  # the host itself goes on
    one.settle()
    one.check_idle()


def test_tiers_without_a_host_pool_plan_nothing() -> None:
    one = TierWorld(4, 4, 0, TierOptions(has_storage=True))
    one.run("a", text(1, 3))
    assert one.tiers.make_room(4)
    assert not one.tiers.has_plans
    assert one.tiers.num_under_way == 0
    one.check_idle()


def test_options_out_of_range_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TierOptions(num_ranks=0)
    with pytest.raises(ConfigError, match="at least 1"):
        replace(TierOptions(), write_through_threshold=0)
