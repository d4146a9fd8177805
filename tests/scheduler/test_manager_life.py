"""The CacheManager's calls beyond match, allocate, publish, release; fault kinds are named where one is meant."""

from __future__ import annotations

import hashlib
import random
import resource
import threading

import numpy as np
import pytest

from fastkv.core.digest import Identity, ImageSpan, prefix_digests
from fastkv.errors import OutOfBlocksError, RequestError
from fastkv.scheduler import CacheManager
from fastkv.scheduler._native import core

EIGHT = [5, 6, 7, 8, 9, 10, 11, 12]


# -- speculation --


def test_speculation_publishes_confirmed_tokens_only_and_gives_rejected_slots_back(manager, admit):
    """6 confirmed, 3 drafts written, 1 accepted -> 7 confirmed, only block 0 published; block 1 once token 8 is in."""
    manager.open("one", EIGHT[:6])
    manager.allocate("one", 2)
    assert manager.publish("one", 6) == 1
    assert manager.reserve_drafts("one", 3).tolist() == [2]
    assert manager.confirm("one", EIGHT[6:7]) == 1
    assert manager.num_tokens("one") == 7
    assert manager.publish("one", 7) == 1
    manager.append("one", EIGHT[7:])
    assert manager.publish("one", 8) == 2
    assert manager.stats().published_blocks == 2
    assert admit(manager, "two", [*EIGHT, 1]) == 8


def test_speculation_without_room_reserves_nothing(manager):
    manager.open("one", EIGHT)
    manager.allocate("one", 2)
    assert manager.reserve_drafts("one", 9) is None
    assert (manager.stats().free, len(manager.block_table("one"))) == (2, 2)
    assert manager.reserve_drafts("one", 0).tolist() == []
    with pytest.raises(RequestError, match="-1 drafts"):
        manager.reserve_drafts("one", -1)


# -- preemption and forks --


def test_preempt_keeps_tokens_and_resumes_from_what_was_published(manager):
    manager.open("one", EIGHT)
    manager.match("one")
    manager.allocate("one", 2)
    manager.publish("one", 8)
    manager.append("one", [1, 2])
    manager.preempt("one")
    assert (manager.num_tokens("one"), manager.num_computed_tokens("one"), manager.stats().held) == (10, 0, 0)
    assert manager.match("one").num_tokens == 8


def test_fork_shares_full_blocks_and_copies_the_partial_one(admit):
    manager = CacheManager(8, 4)
    admit(manager, "one", EIGHT[:6])
    (copy,) = manager.fork("one", "two")
    first, second = manager.block_table("one").tolist(), manager.block_table("two").tolist()
    assert first[0] == second[0]
    assert (copy.source, copy.target) == (first[1], second[1])
    assert manager.num_computed_tokens("two") == 6
    manager.append("one", [1])
    manager.append("two", [2])
    assert manager.num_tokens("one") == manager.num_tokens("two") == 7
    manager.release("one")
    manager.check_integrity()
    assert manager.block_table("two").tolist() == second


def test_fork_at_a_block_edge_copies_nothing_and_works_without_prefix_caching(admit):
    manager = CacheManager(8, 4, enable_prefix_caching=False)
    manager.open("one", EIGHT)
    manager.allocate("one", 2)
    manager.publish("one", 8)
    assert manager.fork("one", "two") == []
    assert manager.block_table("one").tolist() == manager.block_table("two").tolist()
    manager.release("one")
    assert manager.stats().held == 2
    manager.release("two")
    assert manager.stats().free == 8


def test_fork_without_a_block_for_the_copy_is_refused_without_effect(admit):
    manager = CacheManager(2, 4)
    admit(manager, "one", EIGHT[:6])
    before = manager.stats()
    with pytest.raises(OutOfBlocksError):
        manager.fork("one", "two")
    assert manager.stats() == before
    assert not manager.is_open("two")


# -- digests --


@pytest.mark.parametrize("hardware", [True, False])
def test_native_digests_equal_hashlibs(hardware):
    core.use_sha_hardware(hardware)
    try:
        for size in (0, 1, 55, 56, 63, 64, 65, 127, 128, 1000):
            data = bytes(range(256))[:size] if size <= 256 else b"x" * size
            assert core.sha256(data) == hashlib.sha256(data).digest()
        for block_size in (1, 3, 16, 64):
            manager = CacheManager(4, block_size)
            identity = Identity(salt="s", images=(ImageSpan(b"p", 2, 5), ImageSpan(b"q", 80, 81)))
            tokens = [random.Random(1).randrange(2**31) for _ in range(200)]
            manager.open("one", tokens, identity)
            assert manager.prefix_digests("one", 2) == prefix_digests(tokens, block_size, identity)[:2]
            assert manager.prefix_digests("one") == prefix_digests(tokens, block_size, identity)
            manager.append("one", tokens)
            assert manager.prefix_digests("one") == prefix_digests(tokens * 2, block_size, identity)
    finally:
        core.use_sha_hardware(True)


def test_prefix_digests_of_more_blocks_than_are_full_is_refused(manager):
    manager.open("one", EIGHT)
    with pytest.raises(RequestError, match="2 full blocks, not 3"):
        manager.prefix_digests("one", 3)


# -- the border --


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint64", ">i4"])
def test_open_takes_any_integer_array(manager, admit, dtype):
    admit(manager, "one", np.array(EIGHT, dtype=dtype))
    assert admit(manager, "two", [*EIGHT, 1]) == 8


def test_open_takes_strided_arrays_and_tuples(manager, admit):
    admit(manager, "one", np.array([x for t in EIGHT for x in (t, 0)], dtype=np.int32)[::2])
    assert admit(manager, "two", (*EIGHT, 1)) == 8


def test_append_takes_one_token_as_an_int(manager):
    manager.open("one", [1])
    manager.append("one", 7)
    manager.append("one", np.int64(8).item())
    with pytest.raises(RequestError):
        manager.append("one", -1)
    assert manager.num_tokens("one") == 3


class _Place:
    def __init__(self, cpu: bool) -> None:
        self.cpu = cpu

    def is_cpu_place(self) -> bool:
        return self.cpu

    def is_cuda_pinned_place(self) -> bool:
        return False


class _Tensor:
    """What the manager uses of a Paddle tensor."""

    def __init__(self, array: np.ndarray, cpu: bool = True) -> None:
        self.array, self.place, self.dtype, self.shape = array, _Place(cpu), f"paddle.{array.dtype}", list(array.shape)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


@pytest.mark.parametrize("wrap", [lambda a: a, _Tensor])
def test_write_block_tables_fills_a_batch_in_place(manager, wrap):
    for name, blocks in (("one", 1), ("two", 2)):
        manager.open(name, EIGHT)
        manager.allocate(name, blocks)
    rows = np.full((3, 3), 77, dtype=np.int32)
    manager.write_block_tables(["two", "one"], wrap(rows))
    assert rows.tolist() == [[1, 2, -1], [0, -1, -1], [77, 77, 77]]
    row = np.full(2, 77, dtype=np.int32)
    assert manager.write_block_table("one", wrap(row)) == 1
    assert row.tolist() == [0, -1]


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((1, 4), dtype=np.int32),
        np.zeros((2, 1), dtype=np.int32),
        np.zeros((2, 4), dtype=np.int64),
        np.zeros((4, 4), dtype=np.int32)[:, ::2],
        _Tensor(np.zeros((2, 4), dtype=np.int32), cpu=False),
        _Tensor(np.zeros((2, 4), dtype=np.int64)),
        [[0, 0], [0, 0]],
    ],
)
def test_write_block_tables_refuses_memory_that_does_not_fit(manager, out):
    for name in ("one", "two"):
        manager.open(name, EIGHT)
        manager.allocate(name, 2)
    with pytest.raises(RequestError, match="out"):
        manager.write_block_tables(["one", "two"], out)
    if isinstance(out, np.ndarray):
        assert not out.any()


# -- threads --


def test_accounting_under_load_from_several_threads(admit):
    """Requests of four threads share prefixes and evict each other's; nothing is lost and nothing is left."""
    manager = CacheManager(40, 4, record_events=True)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(700):
                name = f"{number}-{turn}"
                manager.open(name, np.array([rng.randrange(2)] * 12 + [rng.randrange(2) for _ in range(9)], np.int32))
                found = manager.match(name)
                if manager.try_allocate(name, manager.blocks_needed(name, 21)) is not None:
                    table = manager.block_table(name)
                    assert table[: len(found.device_blocks)].tolist() == found.device_blocks.tolist()
                    manager.publish(name, 21)
                    manager.prefix_digests(name)
                if turn % 50 == 0:
                    manager.check_integrity()
                    manager.take_events()
                manager.release(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.check_integrity()
    assert (manager.stats().held, manager.stats().open_requests) == (0, 0)


def test_rebuild_ten_times_leaves_memory_flat(admit):
    """Managers with a pool of 100,000 blocks come and go; the process does not grow."""

    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    def build_and_drop() -> None:
        manager = CacheManager(100_000, 16, record_events=True)
        admit(manager, "one", np.arange(400_000, dtype=np.int32))
        manager.take_events()
        manager.release("one")

    build_and_drop()
    before = resident_bytes()
    for _ in range(10):
        build_and_drop()
    assert resident_bytes() - before < 20 << 20
