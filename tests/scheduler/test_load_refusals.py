"""Loads that were refused, or failed, change nothing that a later call could mistake for computed blocks."""

from __future__ import annotations

import pytest
from helpers.tier_world import TierWorld

from fastkv.core.spec import Level
from fastkv.errors import RequestError

THREE_BLOCKS = [*range(100, 112), 7]  # and one token more, so that all three can be found


@pytest.fixture
def one() -> TierWorld:
    """Four device blocks; the host has three blocks that the device lost."""
    one = TierWorld(num_device=4, block_size=4, num_host=8)
    one.run("first", THREE_BLOCKS)
    one.run("second", [*range(200, 212), 7])
    return one


def held_on_device(one: TierWorld) -> int:
    return int(one.manager._counts(int(Level.DEVICE))[3])


def test_failed_load_cannot_be_published_by_a_caller_who_does_not_ask(one: TierWorld) -> None:
    """Kind "failed load": nobody wrote those blocks; the next request would have been served them."""
    one.open("c", THREE_BLOCKS)
    assert one.start("c")
    one.carry_out(0, fail_at=1)
    with pytest.raises(RequestError, match="whose copy failed; load them again, or preempt"):
        one.manager.publish("c", 13)
    one.release("c")
    one.open("d", THREE_BLOCKS)
    found = one.manager.match("d")
    assert (found.device_blocks.size, found.host_blocks.size) == (0, 3)
    one.release("d")
    one.check_idle()


def test_failed_load_can_be_loaded_again(one: TierWorld) -> None:
    one.open("c", THREE_BLOCKS)
    assert one.start("c")
    one.carry_out(0, fail_at=1)
    one.jobs["c"].load = one.tiers.load(["c"])
    one.settle()
    assert one.finish("c")
    one.release("c")
    one.settle()
    one.check_idle()


def test_load_of_several_requests_with_a_bad_one_begins_none(one: TierWorld) -> None:
    one.open("c", THREE_BLOCKS)
    one.manager.match("c")
    one.manager.allocate("c", 4)
    one.open("no blocks", THREE_BLOCKS)
    one.manager.match("no blocks")
    for names in (["c", "no blocks"], ["c", "unknown"], ["c", "c"]):
        with pytest.raises(RequestError):
            one.tiers.load(names)
        assert one.tiers.num_under_way == 0
    one.jobs["c"].load = one.tiers.load(["c"])  # as if it had not been asked
    one.jobs["c"].cached = 12
    one.settle()
    assert one.finish("c")
    for name in ("c", "no blocks"):
        one.release(name)
    one.settle()
    assert held_on_device(one) == 0
    one.check_idle()
