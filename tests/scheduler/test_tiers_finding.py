"""TierManager: what is findable when, across device, host and storage, and what goes first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from helpers.tier_world import TierWorld, counts, text, world

from fastkv.core.spec import Level
from fastkv.scheduler import CacheManager
from fastkv.scheduler.tier_options import TierOptions, WritePolicy
from fastkv.scheduler.tiers import TierManager

POLICIES = list(WritePolicy)


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


def digests_of(one: TierWorld, tokens: list[int]) -> list[bytes]:
    one.manager.open("digests", tokens)
    found = one.manager.prefix_digests("digests")
    one.manager.release("digests")
    return found
