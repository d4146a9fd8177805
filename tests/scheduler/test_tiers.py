"""TierManager, one scenario a test: what moves when, what is findable when, and what a failure costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.tier_world import POISON, TierWorld, counts, text, world

from fastkv.core.spec import Level
from fastkv.errors import ConfigError, RequestError
from fastkv.scheduler import CacheManager
from fastkv.scheduler.tiers import TierManager, TierOptions, WritePolicy

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


# -- finding ------------------------------------------------------------------------------------------------------


def test_hit_that_spans_device_host_and_storage_keeps_token_order() -> None:
    one = world(num_device=7, num_host=6, has_storage=True)
    tokens = text(1, 6)
    one.store.update({(0, digest): digest for digest in digests_of(one, tokens)})
    one.open("a", tokens[:17])
    one.start("a")
    one.finish("a")
    one.release("a")
    one.settle()  # blocks 0 to 3 are on device and host
    one.open("b", text(2, 4))
    one.start("b")  # takes the device blocks of 2 and 3
    one.open("c", tokens)
    assert one.tiers.fetch("c")
    assert one.tiers.is_fetching("c")
    assert one.manager.match("c").num_tokens == 16  # nothing is found before it has landed
    one.settle()
    assert not one.tiers.is_fetching("c")
    found = one.manager.match("c")
    assert (len(found.device_blocks), len(found.host_blocks)) == (2, 4)
    one.expect_content("c", found.device_blocks.tolist(), found.host_blocks.tolist())
    one.release("b")
    assert one.start("c")
    one.settle()
    assert one.finish("c")
    assert one.jobs["c"].cached == 24
    one.release("c")
    one.settle()
    one.check_idle()


def test_fetch_of_less_than_storage_promised_is_a_shorter_hit() -> None:
    one = world(num_device=8, has_storage=True)
    tokens = text(1, 4)
    digests = digests_of(one, tokens)
    one.store.update({(0, digest): digest for digest in digests[:2]})
    one.lies = 2
    assert one.run("a", tokens) == 8
    assert (one.tiers.stats.fetched_blocks, one.tiers.stats.missed_blocks) == (2, 2)
    one.check_idle()


def test_fetch_past_its_deadline_is_not_waited_for_and_its_blocks_stay_out_of_use() -> None:
    one = world(num_device=8, num_host=4, has_storage=True, fetch_timeout_s=2.0)
    tokens = text(1, 3)
    one.store.update({(0, digest): digest for digest in digests_of(one, tokens)})
    one.open("a", tokens)
    assert one.tiers.fetch("a")
    one.send()
    one.now += 1
    one.tiers.expire()
    assert one.tiers.is_fetching("a")
    one.now += 1
    one.tiers.expire()
    assert not one.tiers.is_fetching("a")
    assert counts(one, Level.HOST) == (1, 0, 3)
    assert one.start("a")
    assert one.jobs["a"].cached == 0
    one.finish("a")
    one.carry_out(0)  # late
    assert one.tiers.stats.fetched_blocks == 0
    one.release("a")
    one.settle()
    one.check_idle()


def test_fetch_asks_once_for_what_two_waiting_requests_share() -> None:
    one = world(num_device=8, has_storage=True)
    tokens = text(1, 3)
    one.store.update({(0, digest): digest for digest in digests_of(one, tokens)})
    one.open("a", tokens)
    one.open("b", tokens)
    assert one.tiers.fetch("a")
    assert one.tiers.fetch("b")  # waits for the same plan
    one.send()
    assert len(one.ranks[0].inbox) == 1
    assert one.tiers.is_fetching("b")
    one.settle()
    assert not one.tiers.is_fetching("b")
    assert one.manager.match("b").num_tokens == 12
    one.release("a")
    one.release("b")
    one.check_idle()


def test_fetch_that_joined_another_goes_on_with_its_own_blocks() -> None:
    one = world(num_device=8, has_storage=True)
    for tokens in (text(1, 2), text(1, 2)[:8] + text(2, 2)):
        one.store.update({(0, digest): digest for digest in digests_of(one, tokens)})
    one.open("a", text(1, 2))
    one.open("b", text(1, 2)[:8] + text(2, 2))
    assert one.tiers.fetch("a")
    assert one.tiers.fetch("b")
    one.settle()
    assert one.tiers.is_fetching("b")  # now for blocks 2 and 3
    one.settle()
    assert not one.tiers.is_fetching("b")
    assert one.manager.match("b").num_tokens == 16
    one.open("c", text(1, 2))
    one.tiers.forget("c")
    for name in "abc":
        one.release(name)
    one.check_idle()


def test_lookup_gets_a_deadline_and_its_digests_begin_after_what_is_cached() -> None:
    class Lookup:
        def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
            self.digests, self.left_s = list(digests), deadline_s - time.monotonic()
            return 0

    lookup = Lookup()
    manager = CacheManager(8, 4, num_host_blocks=8)
    tiers = TierManager(manager, TierOptions(has_storage=True, lookup_timeout_s=0.25), lookup)
    manager.open("a", text(1, 2))
    manager.match("a")
    manager.allocate("a", 3)
    manager.publish("a", 9)
    manager.open("b", text(1, 2)[:8] + text(2, 2))
    assert not tiers.fetch("b")
    assert 0 < lookup.left_s <= 0.25
    assert lookup.digests == manager.prefix_digests("b", 4)[2:]
    newer = Lookup()
    tiers.set_weights_version("2")
    lookup.digests = []
    manager.open("c", text(1, 2)[:8] + text(2, 2))
    assert not tiers.fetch("c")
    assert lookup.digests == []  # not under the old version any more
    tiers.use_lookup(newer)
    assert not tiers.fetch("c")
    assert newer.digests == manager.prefix_digests("c", 4)  # the new version's storage is asked, for all blocks
    assert not TierManager(manager, TierOptions()).fetch("b")  # no storage


def test_level_order_on_the_host_is_leaf_first_lru_and_parents_stay() -> None:
    """DESIGN: a block findable on the host has its parent findable there or on the device."""
    one = world(num_device=4, num_host=4)
    one.run("a", text(1, 3))
    one.run("b", text(2, 1))  # the host is full: a0 a1 a2 b0
    one.run("c", text(3, 2))  # pushes out a2, a1 on the host; on the device everything of a is gone
    one.open("look", text(1, 3))
    found = one.manager.match("look")
    assert found.num_tokens == 4
    one.release("look")
    one.open("look", text(2, 1))
    assert one.manager.match("look").num_tokens == 4
    one.release("look")
    one.check_idle()


def test_copies_do_not_change_what_is_evicted_next() -> None:
    """A copy holds its blocks in place: the eviction order is that of a cache without tiers."""

    def evicted(num_host: int) -> list[int]:
        one = world(num_device=9, num_host=num_host)
        for name in range(3):
            one.open(f"r{name}", text(name, 2))
            assert one.start(f"r{name}")
            assert one.finish(f"r{name}")
            one.send()
        for name in range(3):
            one.release(f"r{name}")
        for rank in one.ranks:  # the copies end in another order than the requests
            while rank.inbox:
                one.carry_out(0, len(rank.inbox) - 1)
        left = []
        for step in range(6):
            one.open(f"more{step}", [9000 + step])
            assert one.start(f"more{step}")
            left.append(sum(len(found(one, text(name, 2))) for name in range(3)))
        return left

    def found(one: TierWorld, tokens: list[int]) -> list[int]:
        one.open("look", tokens)
        blocks = one.manager.match("look").device_blocks.tolist()
        one.manager.release("look")
        del one.jobs["look"]
        return blocks

    assert evicted(num_host=12) == evicted(num_host=0)


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


def digests_of(one: TierWorld, tokens: list[int]) -> list[bytes]:
    one.manager.open("digests", tokens)
    found = one.manager.prefix_digests("digests")
    one.manager.release("digests")
    return found
