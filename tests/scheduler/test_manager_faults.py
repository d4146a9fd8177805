"""Kinds of faults that users of cache managers met, on a toy of 4 blocks of 4 tokens; tests are named for the kind."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fastkv.core.digest import Identity, ImageSpan
from fastkv.errors import ConfigError, OutOfBlocksError, RequestError
from fastkv.scheduler import CacheManager

EIGHT = [5, 6, 7, 8, 9, 10, 11, 12]
IMAGE_A, IMAGE_B = ImageSpan(b"a" * 32, 1, 3), ImageSpan(b"b" * 32, 1, 3)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Identity(), Identity(lora="X")),
        (Identity(), Identity(salt="X")),
        (Identity(lora="X"), Identity(salt="X")),
        (Identity(lora="X", lora_id=1), Identity(lora="X", lora_id=2)),
        (Identity(), Identity(weights_version="2")),
        (Identity(), Identity(images=(IMAGE_A,))),
        (Identity(images=(IMAGE_A,)), Identity(images=(IMAGE_B,))),
        (Identity(images=(IMAGE_A,)), Identity(images=(ImageSpan(b"a" * 32, 0, 3),))),
        (Identity(salt="ab"), Identity(salt="a", lora="b")),
    ],
)
def test_identity_in_the_key_differs_then_nothing_is_shared(manager, admit, first, second):
    admit(manager, "one", EIGHT[:6], first)
    assert admit(manager, "two", EIGHT[:6], second) == 0
    manager.release("two")
    assert admit(manager, "three", EIGHT[:6], first) == 4


def test_identity_in_the_key_image_that_starts_later_shares_what_is_before(admit):
    """An image concerns its own block and the ones after it, not the ones before."""
    manager = CacheManager(8, 4)
    tokens = [*EIGHT, 13]
    admit(manager, "one", tokens, Identity(images=(ImageSpan(b"a", 5, 7),)))
    assert admit(manager, "two", tokens, Identity(images=(ImageSpan(b"b", 5, 7),))) == 4


def test_identity_in_the_key_image_ending_at_a_block_edge_reaches_later_blocks(admit):
    """Same tokens after two images that end exactly at token 4: the second block must not be shared either."""
    manager = CacheManager(8, 4)
    tokens = [*EIGHT, 13]
    admit(manager, "one", tokens, Identity(images=(ImageSpan(b"a", 1, 4),)))
    assert admit(manager, "two", tokens, Identity(images=(ImageSpan(b"b", 1, 4),))) == 0
    assert admit(manager, "three", tokens, Identity(images=(ImageSpan(b"a", 1, 4),))) == 8


def test_identity_in_the_key_same_second_block_after_a_different_first_is_a_miss(manager, admit):
    admit(manager, "one", EIGHT)
    assert admit(manager, "two", [1, 2, 3, 4, *EIGHT[4:]]) == 0


@pytest.mark.parametrize(("num_tokens", "cached"), [(8, 4), (9, 8), (4, 0), (5, 4), (3, 0)])
def test_full_hit_leaves_one_token_to_compute(admit, num_tokens, cached):
    manager = CacheManager(8, 4)
    tokens = [*EIGHT, 13][:num_tokens]
    admit(manager, "one", tokens)
    assert admit(manager, "two", tokens) == cached
    assert manager.block_table("two").tolist()[: cached // 4] == manager.block_table("one").tolist()[: cached // 4]


def test_full_hit_keeps_images_whole(admit):
    """The one token that is left would cut the image [2, 8): the hit ends before the image's block."""
    manager = CacheManager(8, 4)
    picture = Identity(images=(ImageSpan(b"a", 2, 8),))
    admit(manager, "one", EIGHT, picture)
    assert admit(manager, "two", EIGHT, picture) == 0
    admit(manager, "three", [*EIGHT, 13], picture)
    manager.release("three")
    assert admit(manager, "four", [*EIGHT, 13], picture) == 8


def test_partial_block_is_published_once_when_full(manager):
    manager.open("one", EIGHT[:6])
    manager.allocate("one", 2)
    assert manager.publish("one", 6) == 1
    manager.append("one", EIGHT[6:])
    assert manager.publish("one", 7) == 1
    assert manager.publish("one", 8) == 2
    assert manager.publish("one", 8) == 2
    assert manager.stats().published_blocks == 2


def test_partial_block_chunk_then_abort_leaves_only_the_computed_block(manager, admit):
    manager.open("one", EIGHT)
    manager.allocate("one", 2)
    manager.publish("one", 4)
    manager.release("one")
    assert (manager.stats().free, manager.stats().evictable) == (3, 1)
    assert admit(manager, "two", [*EIGHT, 13]) == 4


def test_double_release_and_unknown_ids_are_refused_without_effect(manager, admit):
    admit(manager, "one", EIGHT)
    manager.release("one")
    before = manager.stats()
    for call in (manager.release, manager.match, manager.preempt, manager.block_table, manager.num_tokens):
        for request_id in ("one", "never"):
            with pytest.raises(RequestError, match=f"'{request_id}' is not open"):
                call(request_id)
    assert manager.stats() == before
    manager.open("two", EIGHT)
    with pytest.raises(RequestError, match="open already"):
        manager.open("two", EIGHT)
    first = manager.allocate("two", 4).tolist()
    assert sorted(first) == [0, 1, 2, 3]
    manager.check_integrity()


@pytest.mark.parametrize("exit_by", ["allocation fails", "abort", "preempt", "bad tokens", "no match"])
def test_leaks_hundred_rounds_leave_counts_as_at_the_start(manager, admit, exit_by):
    admit(manager, "base", EIGHT)
    manager.release("base")
    start = manager.stats()
    for _ in range(100):
        manager.open("r", [*EIGHT, 1, 2, 3])
        if exit_by != "no match":
            assert manager.match("r").num_tokens == 8
        if exit_by == "allocation fails":
            with pytest.raises(OutOfBlocksError):
                manager.allocate("r", 3)
        elif exit_by == "preempt":
            manager.allocate("r", 1)
            manager.preempt("r")
        elif exit_by == "bad tokens":
            with pytest.raises(RequestError):
                manager.append("r", [-1])
        manager.release("r")
        manager.check_integrity()
    end = manager.stats()
    assert (end.free, end.evictable, end.held) == (start.free, start.evictable, start.held)
    assert end.evicted_blocks == 0


def test_accounting_under_load_ten_thousand_operations(admit):
    rng = random.Random(7)
    manager = CacheManager(24, 4)
    live: list[str] = []
    for step in range(10_000):
        if live and (rng.random() < 0.5 or len(live) > 5):
            request_id = live.pop(rng.randrange(len(live)))
            rng.choice([manager.release, lambda r: (manager.preempt(r), manager.release(r))])(request_id)
        else:
            request_id = f"r{step}"
            manager.open(request_id, [rng.randrange(2) for _ in range(rng.randrange(1, 17))])
            live.append(request_id)
            manager.match(request_id)
            tokens = manager.num_tokens(request_id)
            if manager.try_allocate(request_id, manager.blocks_needed(request_id, tokens)) is not None:
                manager.publish(request_id, tokens)
        if step % 20 == 0:
            manager.check_integrity()
    for request_id in live:
        manager.release(request_id)
    manager.check_integrity()
    assert manager.stats().held == 0


def test_eviction_takes_leaves_first_and_the_least_recently_used_first(admit):
    """Two chains of two blocks; the older chain goes first, its leaf before its root."""
    manager = CacheManager(4, 4)
    admit(manager, "old", EIGHT)
    old = manager.block_table("old").tolist()
    admit(manager, "new", [1, *EIGHT[1:]])
    new = manager.block_table("new").tolist()
    manager.release("old")
    manager.release("new")
    manager.open("r", [99] * 16)
    assert [manager.allocate("r", 1).tolist()[0] for _ in range(4)] == [old[1], old[0], new[1], new[0]]


def test_eviction_of_a_prefix_in_use_by_another_request_is_impossible(manager, admit):
    admit(manager, "one", EIGHT)
    admit(manager, "two", EIGHT)
    manager.release("one")
    manager.open("three", [1] * 16)
    held = manager.block_table("two").tolist()
    assert manager.try_allocate("three", 3) is None
    assert not set(manager.allocate("three", 2).tolist()) & set(held)
    assert manager.block_table("two").tolist() == held


def test_publish_duplicate_block_ends_as_one_published_copy(manager, admit):
    """Two requests computed the same block at the same time: one copy stays, the table follows, nothing leaks."""
    for request_id in ("one", "two"):
        manager.open(request_id, EIGHT)
        assert manager.match(request_id).num_tokens == 0
        manager.allocate(request_id, 2)
    manager.publish("one", 8)
    manager.publish("two", 8)
    assert manager.block_table("one").tolist() == manager.block_table("two").tolist()
    assert (manager.stats().free, manager.stats().duplicate_blocks) == (2, 2)
    manager.release("one")
    manager.release("two")
    assert (manager.stats().free, manager.stats().evictable) == (2, 2)


def test_publish_more_than_confirmed_or_than_the_blocks_hold_is_refused(manager):
    manager.open("one", EIGHT)
    manager.allocate("one", 1)
    for computed in (5, 9, -1):
        with pytest.raises(RequestError, match="computed tokens"):
            manager.publish("one", computed)
    manager.publish("one", 4)
    with pytest.raises(RequestError, match="it had 4"):
        manager.publish("one", 3)


def test_allocate_zero_gives_none_and_negative_is_refused(manager):
    """A peer's allocate(0) handed out every free block."""
    manager.open("one", EIGHT)
    assert manager.allocate("one", 0).tolist() == []
    with pytest.raises(RequestError, match="-1"):
        manager.allocate("one", -1)
    with pytest.raises(OutOfBlocksError, match="5 device blocks were requested, 4 of 4"):
        manager.allocate("one", 5)
    assert manager.stats().free == 4


def test_try_allocate_into_refuses_a_row_that_does_not_fit_and_changes_nothing(manager):
    manager.open("one", list(range(20)))
    manager.allocate("one", 2)
    read_only = np.zeros(8, dtype=np.int32)
    read_only.flags.writeable = False
    free = manager.stats().free
    for bad in (
        np.zeros(3, dtype=np.int32),
        np.zeros(8, dtype=np.int64),
        np.zeros(16, dtype=np.int32)[::2],
        read_only,
        [0] * 8,
    ):
        with pytest.raises(RequestError, match="out_row"):
            manager.try_allocate_into("one", 2, bad)
    assert manager.block_table("one").size == 2
    assert manager.stats().free == free
    manager.check_integrity()


def test_write_block_table_pads_the_row_and_refuses_a_short_one(manager):
    manager.open("one", EIGHT)
    ids = manager.allocate("one", 2).tolist()
    row = np.full(4, 77, dtype=np.int32)
    assert manager.write_block_table("one", row) == 2
    assert row.tolist() == [*ids, -1, -1]
    for bad in (np.zeros(1, dtype=np.int32), np.zeros(4, dtype=np.int64), np.zeros((2, 2), dtype=np.int32)):
        with pytest.raises(RequestError, match="out_row"):
            manager.write_block_table("one", bad)


def test_reset_with_open_requests_is_refused_and_without_them_frees_everything(manager, admit):
    admit(manager, "one", EIGHT)
    with pytest.raises(RequestError, match="1 requests are open"):
        manager.reset()
    manager.release("one")
    manager.reset()
    assert manager.stats().free == 4
    assert admit(manager, "two", EIGHT) == 0


def test_prefix_caching_off_shares_nothing(admit):
    manager = CacheManager(8, 4, enable_prefix_caching=False)
    admit(manager, "one", EIGHT)
    assert admit(manager, "two", EIGHT) == 0
    assert manager.stats().published_blocks == 0


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (-1, 4)])
def test_manager_without_blocks_is_a_config_error(arguments):
    with pytest.raises(ConfigError, match="must be at least 1"):
        CacheManager(*arguments)


@pytest.mark.parametrize("tokens", [[], [1.5], [-1], [2**31], [[1, 2]], "text", b"text", None, [True], ["a"], 5])
def test_open_with_bad_tokens_is_refused_without_effect(manager, tokens):
    with pytest.raises(RequestError):
        manager.open("one", tokens)
    assert manager.stats().open_requests == 0


@pytest.mark.parametrize("request_id", ["", 3, None])
def test_open_with_a_bad_id_is_refused(manager, request_id):
    with pytest.raises(RequestError, match="non-empty str"):
        manager.open(request_id, EIGHT)


def test_open_copies_the_callers_tokens(manager, admit):
    tokens = np.array(EIGHT, dtype=np.int32)
    manager.open("one", tokens)
    tokens[:] = 0
    manager.allocate("one", 2)
    manager.publish("one", 8)
    assert admit(manager, "two", EIGHT) == 4


def test_counts_of_tokens_past_31_bits_are_refused_and_change_nothing(manager):
    manager.open("one", EIGHT)
    for call in (manager.reserve_drafts, manager.blocks_needed):
        for count in (2**31, 2**63 - 1):
            with pytest.raises(RequestError, match="2147483647"):
                call("one", count)
    assert manager.stats().free == 4


def test_pin_limit_follows_a_pool_that_was_profiled_later(admit):
    manager = CacheManager(None, 4)
    manager.resize(8)
    admit(manager, "one", EIGHT)
    manager.open("again", [*EIGHT, 1])
    manager.match("again")
    assert manager.pin("again") is not None
    manager.open("more", list(range(50, 75)))
    manager.allocate("more", 6)
    manager.publish("more", 24)
    with pytest.raises(RequestError, match="2 of at most 4 are pinned"):
        manager.pin("more")
