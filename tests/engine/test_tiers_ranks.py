"""Two ranks in two real processes: plans are acknowledged by both, and one that dies or stalls fails them for both."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.rank_process import RankWorker
from helpers.toy import toy_data

from fastkv import CacheManager, parse_config
from fastkv.engine.levels import tier_options
from fastkv.engine.ranks import RankGroup
from fastkv.errors import ConfigError, TransferError
from fastkv.scheduler.tier_options import TierOptions
from fastkv.scheduler.tiers import TierManager


class Pair:
    """Two rank processes, and the scheduler's side of them. A block's content is labelled by its first token."""

    def __init__(self, store: Path, timeout_s: float, copy_timeout_s: float) -> None:
        data = toy_data("gqa", quant_type="block_wise_fp8", tp_size=2, num_device_blocks=4, num_host_blocks=8)
        data["storage"] = {"path": str(store), "max_bytes": "32MiB", "segment_bytes": "1MiB"}
        data["cache"]["transfer_timeout_s"] = copy_timeout_s
        self.config = parse_config(data)
        self.manager = CacheManager(4, 4, num_host_blocks=8)
        options = tier_options(self.config, has_storage=True, num_ranks=2)
        assert options.transfer_timeout_s > self.config.cache.transfer_timeout_s
        options = TierOptions(num_ranks=2, has_storage=True, transfer_timeout_s=timeout_s)
        self.tiers = TierManager(self.manager, options, self)
        with ThreadPoolExecutor(2) as pool:
            workers = list(pool.map(lambda rank: RankWorker(self.config, rank), (0, 1)))
        self.group = RankGroup(workers, answer_timeout_s=0.3)
        self.stored: set[bytes] = set()

    def contains(self, digests: list[bytes], deadline_s: float) -> int:
        return next((i for i, digest in enumerate(digests) if digest not in self.stored), len(digests))

    def open(self, name: str, first: int) -> None:
        self.manager.open(name, list(range(first, first + 13)))

    def start(self, name: str) -> int | None:
        """Returns the id of its load."""
        self.manager.match(name)
        self.manager.allocate(name, self.manager.blocks_needed(name, 13))
        return self.tiers.load([name])

    def compute(self, name: str, first: int) -> None:
        """Both ranks write what the blocks hold after a forward step; then they are published."""
        table = self.manager.block_table(name).tolist()[:3]
        self.each("fill", [[block, first + i] for i, block in enumerate(table)])
        self.manager.publish(name, 13)
        self.tiers.written(name)

    def run(self, name: str, first: int) -> None:
        self.open(name, first)
        assert self.start(name) is None
        self.compute(name, first)
        self.manager.release(name)
        assert self.group.settle(self.tiers, 20)
        self.manager.check_integrity()

    def each(self, command: str, *args: object) -> list[object]:
        alive = [worker for rank, worker in enumerate(self.group.workers) if rank not in self.group.lost]
        return [worker.command(command, *args) for worker in alive]  # type: ignore[attr-defined]

    def wrong(self, name: str, first: int) -> list[object]:
        table = self.manager.block_table(name).tolist()[:3]
        return self.each("wrong", [[block, first + i] for i, block in enumerate(table)])


@pytest.fixture
def make_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    made: list[Pair] = []

    def make(timeout_s: float = 20.0, copy_timeout_s: float = 30.0) -> Pair:
        made.append(Pair(tmp_path / "store", timeout_s, copy_timeout_s))
        return made[-1]

    yield make
    for pair in made:
        for rank, worker in enumerate(pair.group.workers):
            if rank not in pair.group.lost:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGCONT)
        with contextlib.suppress(TransferError):  # of the test that stalls a copy for good
            pair.group.close()


def test_two_ranks_move_their_own_bytes_and_a_killed_one_fails_the_plan_for_both(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair()
    pair.run("a", 100)
    assert pair.tiers.stats.offloaded_blocks == pair.tiers.stats.stored_blocks == 3
    pair.run("b", 200)  # takes a's device blocks
    pair.each("poison")
    pair.open("a again", 100)
    load = pair.start("a again")
    assert load is not None
    assert pair.group.settle(pair.tiers, 20)
    assert pair.tiers.take_load(load)
    assert pair.wrong("a again", 100) == [[], []]  # each rank has its own bytes of every layer and role, MTP's too
    pair.manager.publish("a again", 12)
    pair.manager.release("a again")

    pair.open("c", 200)
    load = pair.start("c")
    assert load is not None
    pair.group.workers[1].command("stall")  # type: ignore[attr-defined]
    pair.group.poll(pair.tiers, 0.05)
    assert not pair.tiers.has_landed(load)  # rank 0 is done, rank 1 is in the middle of a copy
    os.kill(pair.group.workers[1].pid, signal.SIGKILL)
    assert pair.group.settle(pair.tiers, 20)
    assert pair.group.lost == {1}
    assert not pair.tiers.take_load(load)
    assert "rank 1 is lost" in pair.tiers.stats.last_cause
    pair.manager.preempt("c")
    pair.manager.check_integrity()
    assert pair.manager.stats().held == 0
    pair.manager.release("c")


def test_rank_that_meets_a_python_error_is_killed_before_its_blocks_are_free(make_pair: Callable[..., Pair]) -> None:
    """Its process lives, and so did a copy into blocks that the scheduler handed out again."""
    pair = make_pair()
    worker = pair.group.workers[1]
    worker.command("break", "fastkv")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="on purpose"):  # an error that the rank told of: it is asked again
        pair.group.poll(pair.tiers)
    assert pair.group.late == pair.group.lost == set()
    pair.run("a", 100)
    pair.run("b", 200)
    pair.open("c", 100)
    assert pair.start("c") is not None
    worker.command("stall")  # type: ignore[attr-defined]
    worker.command("break", "python")  # type: ignore[attr-defined]
    pair.group.poll(pair.tiers, 0.05)
    assert pair.group.lost == {1}
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    assert pair.group.settle(pair.tiers, 10)
    assert "rank 1 is lost" in pair.tiers.stats.last_cause
    pair.manager.preempt("c")
    assert pair.manager.stats().held == 0
    pair.manager.release("c")


def test_rank_whose_copy_does_not_end_says_so_when_it_is_closed(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(copy_timeout_s=0.3)
    pair.run("a", 100)
    pair.run("b", 200)
    pair.open("c", 100)
    assert pair.start("c") is not None
    pair.group.workers[1].command("stall")  # type: ignore[attr-defined]
    pair.group.poll(pair.tiers, 0.05)
    with pytest.raises(TransferError, match="cannot free the caches: 1 transfers do not end"):
        pair.group.close()
    for worker in pair.group.workers:  # all have ended nevertheless
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)
    pair.group.close()


def test_rank_that_stalls_past_the_deadline_fails_the_plan_and_its_late_answer_frees_the_blocks(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair(timeout_s=0.5)
    pair.tiers.options = TierOptions(num_ranks=2, transfer_timeout_s=0.5)  # no storage here
    pair.run("a", 100)
    pair.run("b", 200)
    pair.open("c", 100)
    load = pair.start("c")
    assert load is not None
    os.kill(pair.group.workers[1].pid, signal.SIGSTOP)
    start = time.monotonic()
    while pair.tiers.num_hopeful and time.monotonic() - start < 10:
        pair.group.poll(pair.tiers, 0.05)
    assert pair.group.late == {1}
    assert "ranks [1] did not acknowledge in time" in pair.tiers.stats.last_cause
    assert not pair.tiers.take_load(load)
    pair.manager.preempt("c")
    assert pair.manager.stats().held == 3  # rank 1 may still write to them
    os.kill(pair.group.workers[1].pid, signal.SIGCONT)
    assert pair.group.settle(pair.tiers, 10)
    assert pair.manager.stats().held == 0
    pair.manager.check_integrity()
    load = pair.start("c")  # the host copies were not harmed
    assert load is not None
    assert pair.group.settle(pair.tiers, 10)
    assert pair.tiers.take_load(load)
    assert pair.wrong("c", 100) == [[], []]
    pair.manager.release("c")


def test_blocks_come_back_from_both_ranks_stores_after_a_restart(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.run("a", 100)
    pair.manager.open("digests", list(range(100, 113)))
    digests = set(pair.manager.prefix_digests("digests"))
    pair.group.close()
    fresh = make_pair()
    fresh.stored = digests
    fresh.each("poison")
    fresh.open("a", 100)
    assert fresh.tiers.fetch("a")
    assert fresh.group.settle(fresh.tiers, 20)
    assert fresh.tiers.stats.fetched_blocks == 3
    load = fresh.start("a")
    assert load is not None
    assert fresh.group.settle(fresh.tiers, 20)
    assert fresh.tiers.take_load(load)
    assert fresh.wrong("a", 100) == [[], []]
    fresh.manager.release("a")
