"""The cache as a whole: pins, priorities, policies, size, new weights; fault kinds are named where one is meant."""

from __future__ import annotations

import pytest

from fastkv.core.digest import Identity, prefix_digests
from fastkv.errors import ConfigError, OutOfBlocksError, RequestError
from fastkv.scheduler import CacheManager

EIGHT = [5, 6, 7, 8, 9, 10, 11, 12]


# -- pins, priorities, policies --


def test_pinned_prefix_stays_and_the_limit_is_an_error(admit):
    manager = CacheManager(8, 4, max_pinned_blocks=2)
    admit(manager, "system", EIGHT)
    pin = manager.pin("system")
    manager.release("system")
    admit(manager, "other", [1] * 24)
    with pytest.raises(RequestError, match="1 more blocks passes the limit: 2 of at most 2"):
        manager.pin("other", 1)
    manager.release("other")
    manager.open("big", [1])
    with pytest.raises(OutOfBlocksError):
        manager.allocate("big", 7)
    assert admit(manager, "again", [*EIGHT, 3]) == 8
    manager.release("again")
    manager.unpin(pin)
    with pytest.raises(RequestError, match="not known"):
        manager.unpin(pin)
    assert manager.allocate("big", 8).size == 8


def test_pin_of_blocks_that_are_not_published_is_refused(manager):
    manager.open("one", EIGHT)
    manager.allocate("one", 2)
    with pytest.raises(RequestError, match="0 published blocks"):
        manager.pin("one")


def test_priority_outlives_later_requests_until_its_time_is_up():
    manager = CacheManager(4, 4, clock=lambda: 0.0)
    manager.open("keep", EIGHT, priority=3, priority_ttl_s=10)
    manager.allocate("keep", 2)
    manager.publish("keep", 8)
    kept = manager.block_table("keep").tolist()
    manager.release("keep")
    manager.open("later", [1] * 8)
    manager.allocate("later", 2)
    manager.publish("later", 8)
    later = manager.block_table("later").tolist()
    manager.release("later")
    manager.open("next", [2] * 16)
    assert [manager.allocate("next", 1).tolist()[0] for _ in range(4)] == [later[1], later[0], kept[1], kept[0]]


def test_priority_expires_as_if_used_at_that_moment():
    now = [0.0]
    manager = CacheManager(4, 4, clock=lambda: now[0])
    for name, priority in (("keep", 1), ("old", 0)):
        manager.open(name, [priority] * 8, priority=priority, priority_ttl_s=10)
        manager.allocate(name, 2)
        manager.publish(name, 8)
    keep, old = manager.block_table("keep").tolist(), manager.block_table("old").tolist()
    manager.release("keep")
    manager.release("old")
    now[0] = 11.0
    manager.open("next", [5] * 16)
    assert [manager.allocate("next", 1).tolist()[0] for _ in range(4)] == [old[1], old[0], keep[1], keep[0]]


def test_priorities_of_two_branches_that_expire_together_leave_children_before_the_parent():
    now = [0.0]
    manager = CacheManager(4, 4, clock=lambda: now[0])
    tables = []
    for name, tail in (("long", [1] * 8), ("short", [2] * 4)):
        manager.open(name, [0] * 4 + tail, priority=1, priority_ttl_s=5)
        manager.match(name)
        manager.allocate(name, manager.blocks_needed(name, 4 + len(tail)))
        manager.publish(name, 4 + len(tail))
        tables.append(manager.block_table(name).tolist())
    (root, upper, lower), (_, other) = tables
    manager.release("long")
    manager.release("short")
    now[0] = 5.0
    manager.open("next", [5] * 16)
    order = [manager.allocate("next", 1).tolist()[0] for _ in range(4)]
    manager.check_integrity()
    assert order == [lower, upper, other, root]


@pytest.mark.parametrize(("priority", "ttl"), [(8, 1.0), (-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_priority_out_of_range_is_refused(manager, priority, ttl):
    with pytest.raises(RequestError, match=r"priority|ttl_s"):
        manager.open("one", EIGHT, priority=priority, priority_ttl_s=ttl)
    assert not manager.is_open("one")


def test_two_queue_policy_keeps_a_prefix_in_use_through_a_scan(admit):
    """One prompt that comes again and again, and prompts that are seen once: LRU loses the first, 2Q keeps it."""
    cached = {}
    for policy in ("lru", "2q"):
        manager = CacheManager(40, 4, policy=policy)
        hits = 0
        for turn in range(6):
            hits += admit(manager, "again", [7] * 33)
            manager.release("again")
            for scan in range(12):
                admit(manager, "once", [1000 * turn + scan + 100] * 16)
                manager.release("once")
        manager.check_integrity()
        cached[policy] = hits
    assert cached["lru"] == 0
    assert cached["2q"] >= 4 * 32


def test_two_queue_policy_readmits_what_it_forgot_too_early(admit):
    """The ghost list: a prefix evicted from probation and computed again soon starts among those in use."""
    manager = CacheManager(20, 4, policy="2q")
    admit(manager, "one", [7] * 8)
    manager.release("one")
    for scan in range(5):
        admit(manager, "scan", [scan] * 16)
        manager.release("scan")
    admit(manager, "one", [7] * 8)
    manager.release("one")
    for scan in range(5, 20):
        admit(manager, "scan", [scan] * 16)
        manager.release("scan")
    assert admit(manager, "one", [7] * 9) == 8


def test_unknown_policy_is_a_config_error():
    with pytest.raises(ConfigError, match="allowed: lru, 2q"):
        CacheManager(4, 4, policy="mru")


# -- resize, clear, new weights --


def test_resize_clear_rebuild_shrink_under_a_held_block_refuses_or_drains(manager, admit):
    """Hold block 3, shrink 4 -> 2: refused; drained: gone when let go; release, grow: ids unique."""
    admit(manager, "low", EIGHT)
    manager.open("high", [1] * 8)
    assert manager.allocate("high", 2).tolist() == [2, 3]
    with pytest.raises(RequestError, match="2 blocks past that are held"):
        manager.resize(2)
    assert manager.stats().num_blocks == 4
    assert manager.resize(2, drain=True) == 2
    assert manager.try_allocate("low", 1) is None
    manager.release("high")
    assert manager.stats().num_blocks == 2
    assert manager.resize(6) == 0
    manager.open("more", [2] * 16)
    assert sorted(manager.allocate("more", 4).tolist()) == [2, 3, 4, 5]
    manager.check_integrity()


def test_resize_shrink_evicts_unheld_blocks_past_the_end_with_what_hangs_below(manager, admit):
    manager.open("hole", [9] * 8)
    manager.allocate("hole", 2)
    admit(manager, "one", EIGHT)
    manager.release("one")
    manager.release("hole")
    assert manager.resize(2) == 0
    stats = manager.stats()
    assert (stats.num_blocks, stats.free, stats.evictable, stats.evicted_blocks) == (2, 2, 0, 2)


def test_block_count_unknown_until_profiled():
    manager = CacheManager(None, 4)
    manager.open("one", EIGHT)
    assert manager.match("one").num_tokens == 0
    with pytest.raises(RequestError, match="not known yet; call resize"):
        manager.allocate("one", 1)
    assert manager.stats().num_blocks == 0
    manager.resize(4)
    assert manager.allocate("one", 2).tolist() == [0, 1]


def test_stale_after_update_nothing_is_found_and_nothing_old_is_published(admit):
    """Cache 8 tokens, bump the weights, same prompt: 0 hits; a request from before re-inserts nothing."""
    manager = CacheManager(8, 4)
    admit(manager, "done", EIGHT)
    manager.release("done")
    manager.open("running", EIGHT)
    manager.allocate("running", 2)
    manager.publish("running", 4)
    manager.set_weights_version("2")
    assert manager.publish("running", 8) == 1
    assert admit(manager, "new", [*EIGHT, 1]) == 0
    manager.release("new")
    manager.preempt("running")
    manager.release("running")
    manager.check_integrity()
    assert admit(manager, "after", [*EIGHT, 1]) == 8
    assert manager.weights_version == "2"
    with pytest.raises(RequestError, match="non-empty"):
        manager.set_weights_version("")


def test_weights_version_goes_into_the_digests_of_later_requests(manager):
    manager.open("before", EIGHT)
    manager.set_weights_version("v2")
    manager.open("after", EIGHT)
    manager.open("own", EIGHT, Identity(weights_version="mine"))
    assert manager.prefix_digests("before") == prefix_digests(EIGHT, 4)
    assert manager.prefix_digests("after") == prefix_digests(EIGHT, 4, Identity(weights_version="v2"))
    assert manager.prefix_digests("own") == prefix_digests(EIGHT, 4, Identity(weights_version="mine"))
