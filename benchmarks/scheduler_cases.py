"""What the scheduler benchmarks measure: a CacheManager and a floor in the same state, sampled operation by operation.

Called by benchmarks/scheduler.py. Every sampler returns nanoseconds a block, of the manager with the Python calls that
an engine would make, of the floor as timed inside C++. Both see the same prompts in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from floor.scheduler_floor import Ids, Prompts, SchedulerFloor

from fastkv.core.digest import ROOT_DIGEST
from fastkv.scheduler import CacheManager

BLOCKS_A_SAMPLE = (
    8192  # short prompts are timed several at once: a call alone after other work costs a microsecond more
)
SINGLES = 256  # requests of one block that are timed together


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one set of rows is measured on.

    Attributes:
        label: the end of the rows' names.
        prompt: tokens of a prompt.
        block: tokens of a block.
        pool: blocks of the pool.
    """

    label: str
    prompt: int
    block: int
    pool: int

    @property
    def blocks(self) -> int:
        """Blocks of a prompt."""
        return self.prompt // self.block

    @property
    def num_prompts(self) -> int:
        """Prompts that fit into the pool."""
        return self.pool // self.blocks

    @property
    def group(self) -> int:
        """Prompts of one sample."""
        return max(1, min(self.num_prompts // 2, BLOCKS_A_SAMPLE // self.blocks))

    def scale(self, ns: float) -> float:
        """Nanoseconds of one sample as nanoseconds a block."""
        return ns / (self.group * self.blocks)


class Bench:
    """A manager and a floor with the same pool, the same prompts in it, and ways to sample each operation.

    A prompt has one token more than its blocks, so that all of them can be found and a token is left to compute.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.manager = CacheManager(sizes.pool, sizes.block)
        self.floor = SchedulerFloor(sizes.pool, sizes.block)
        rng = np.random.default_rng(1)
        self.prompts: Prompts = rng.integers(0, 2**17, (sizes.num_prompts, sizes.prompt + 1), dtype=np.int32)
        self.fresh: Prompts = rng.integers(0, 2**17, (sizes.group, sizes.prompt + 1), dtype=np.int32)
        self.first = [f"first-{i}" for i in range(sizes.num_prompts)]
        self.second = [f"second-{i}" for i in range(sizes.group)]
        self.singles: Prompts = rng.integers(0, 2**17, (SINGLES, sizes.block + 1), dtype=np.int32)
        self.single = [f"single-{i}" for i in range(SINGLES)]
        self.serial = 0

    def close(self) -> None:
        """Give the floor's memory back."""
        self.floor.close()

    def ids(self, count: int | None = None) -> Ids:
        """Room for the floor's block ids."""
        return np.empty((self.sizes.group if count is None else count, self.sizes.blocks), dtype=np.int32)

    def windows(self) -> Iterator[range]:
        """Groups of neighbouring prompts, round and round."""
        group = self.sizes.group
        while True:
            for start in range(0, self.sizes.num_prompts - group + 1, group):
                yield range(start, start + group)

    def fill(self, prompts: range) -> None:
        """Publish these prompts and release them."""
        manager, blocks, prompt = self.manager, self.sizes.blocks, self.sizes.prompt
        for place in prompts:
            manager.open("fill", self.prompts[place])
            manager.allocate("fill", blocks)
            manager.publish("fill", prompt)
            manager.release("fill")
            ids = self.ids(1)
            self.floor.take(ids)
            self.floor.publish(self.prompts[place : place + 1], ids)
            self.floor.release(ids)

    def renew(self, rows: Prompts, start: int) -> None:
        """Make these prompts differ from everything seen so far, from this token on."""
        for row in rows:
            self.serial += 1
            row[start] = 2**17 + self.serial

    # allocate ---------------------------------------------------------------------------------------------------

    def allocate(self) -> list[float]:
        """The manager hands out free blocks."""
        manager, blocks, names, rows = self.manager, self.sizes.blocks, self.second, list(self.ids())
        allocate = manager.try_allocate_into
        for name, tokens in zip(names, self.fresh, strict=True):
            manager.open(name, tokens[:1])
        began = perf_counter_ns()
        for name, row in zip(names, rows, strict=True):
            allocate(name, blocks, row)
        ns = perf_counter_ns() - began
        for name in reversed(names):
            manager.release(name)
        return [self.sizes.scale(ns)]

    def floor_allocate(self) -> list[float]:
        """The floor hands out free blocks."""
        ids = self.ids()
        ns = self.floor.take(ids)
        self.floor.give_back(ids)
        return [self.sizes.scale(ns)]

    # match, acquire, release, hit -------------------------------------------------------------------------------

    def hits(self) -> Iterator[list[float]]:
        """Samples of [match, acquire, release, hit]. Half of the pool is held at any time, so that nothing is warm."""
        scale, held, windows = self.sizes.scale, deque[range](), self.windows()
        keep = self.sizes.num_prompts // self.sizes.group // 2
        try:
            while True:
                while len(held) <= keep:
                    held.append(next(windows))
                    opened, acquired = self._acquire(held[-1])
                oldest = held.popleft()
                matched, released = self._match_again(oldest), self._release(oldest)
                yield [scale(ns) for ns in (matched, acquired, released, opened + acquired + released)]
        finally:
            for window in held:
                self._release(window)

    def _acquire(self, window: range) -> tuple[int, int]:
        manager = self.manager
        names, rows = [self.first[i] for i in window], [self.prompts[i] for i in window]
        begin, match = manager.open, manager.match
        began = perf_counter_ns()
        for name, row in zip(names, rows, strict=True):
            begin(name, row)
        opened = perf_counter_ns()
        for name in names:
            match(name)
        return opened - began, perf_counter_ns() - opened

    def _match_again(self, window: range) -> int:
        manager, names = self.manager, self.second
        for name, place in zip(names, window, strict=True):
            manager.open(name, self.prompts[place])
        match = manager.match
        began = perf_counter_ns()
        for name in names:
            match(name)
        ns = perf_counter_ns() - began
        for name in names:
            expect(manager.num_computed_tokens(name), self.sizes.prompt)
            manager.release(name)
        return ns

    def _release(self, window: range) -> int:
        release, names = self.manager.release, [self.first[i] for i in window]
        began = perf_counter_ns()
        for name in names:
            release(name)
        return perf_counter_ns() - began

    def floor_hits(self) -> Iterator[list[float]]:
        """The same of the floor."""
        floor, scale, blocks = self.floor, self.sizes.scale, self.sizes.blocks
        held, windows = deque[tuple[Prompts, Ids]](), self.windows()
        keep = self.sizes.num_prompts // self.sizes.group // 2
        try:
            while True:
                while len(held) <= keep:
                    window, ids = next(windows), self.ids()
                    held.append((self.prompts[window.start : window.stop], ids))
                    acquired, found = floor.acquire(held[-1][0], blocks, ids)
                    expect(found, ids.size)
                prompts, ids = held.popleft()
                matched, _ = floor.match(prompts, blocks, self.ids())
                released = floor.release(ids)
                yield [scale(ns) for ns in (matched, acquired, released, acquired + released)]
        finally:
            for _, ids in held:
                floor.release(ids)

    # life -------------------------------------------------------------------------------------------------------

    def lives(self) -> Iterator[list[float]]:
        """Samples of [life]: the first half of a prompt is cached, the second was never seen."""
        manager, names, prompt = self.manager, self.second, self.sizes.prompt
        cached = self.sizes.blocks // 2
        own = self.sizes.blocks - cached
        for row in self.prompts:  # used last, so that the second halves are evicted and the first halves stay
            manager.open("touch", row[: cached * self.sizes.block + 1])
            expect(manager.match("touch").num_tokens, cached * self.sizes.block)
            manager.release("touch")
        for window in self.windows():
            self._half_fresh(window)
            rows, found = list(self.fresh), 0
            began = perf_counter_ns()
            for name, row in zip(names, rows, strict=True):
                manager.open(name, row)
                found += manager.match(name).num_tokens
                manager.allocate(name, own)
                manager.publish(name, prompt)
                manager.release(name)
            ns = perf_counter_ns() - began
            expect(found, cached * self.sizes.block * len(names))
            yield [self.sizes.scale(ns)]

    def floor_lives(self) -> Iterator[list[float]]:
        """The same of the floor."""
        half = np.empty((1, self.sizes.blocks // 2), dtype=np.int32)
        for place in range(self.sizes.num_prompts):
            _, found = self.floor.acquire(self.prompts[place : place + 1], half.size, half)
            expect(found, half.size)
            self.floor.release(half)
        for window in self.windows():
            self._half_fresh(window)
            yield [self.sizes.scale(self.floor.life(self.fresh, self.ids()))]

    def _half_fresh(self, window: range) -> None:
        half_tokens = self.sizes.blocks // 2 * self.sizes.block
        self.fresh[:, :half_tokens] = self.prompts[window.start : window.stop, :half_tokens]
        self.renew(self.fresh, half_tokens)

    # publish, admit ---------------------------------------------------------------------------------------------

    def admit(self) -> list[float]:
        """[allocate with eviction, publish, both] of prompts never seen; the pool stays full."""
        manager, blocks, prompt, names = self.manager, self.sizes.blocks, self.sizes.prompt, self.second
        self.renew(self.fresh, 0)
        for name, tokens in zip(names, self.fresh, strict=True):
            manager.open(name, tokens)
        began = perf_counter_ns()
        for name in names:
            manager.allocate(name, blocks)
        allocated = perf_counter_ns()
        for name in names:
            manager.publish(name, prompt)
        published = perf_counter_ns()
        for name in names:
            manager.release(name)
        return [self.sizes.scale(ns) for ns in (allocated - began, published - allocated, published - began)]

    def floor_admit(self) -> list[float]:
        """The same of the floor."""
        self.renew(self.fresh, 0)
        ids = self.ids()
        allocate = self.floor.take(ids)
        publish = self.floor.publish(self.fresh, ids)
        self.floor.release(ids)
        return [self.sizes.scale(ns) for ns in (allocate, publish, allocate + publish)]

    def evict_one(self) -> list[float]:
        """A full pool hands out one block to each of many requests."""
        manager, names = self.manager, self.single
        self.renew(self.singles, 0)
        for name, tokens in zip(names, self.singles, strict=True):
            manager.open(name, tokens)
        began = perf_counter_ns()
        for name in names:
            manager.allocate(name, 1)
        ns = perf_counter_ns() - began
        for name in names:
            manager.publish(name, self.sizes.block)
            manager.release(name)
        return [ns / SINGLES]

    def floor_evict_one(self) -> list[float]:
        """The same of the floor."""
        self.renew(self.singles, 0)
        ids = np.empty((SINGLES, 1), dtype=np.int32)
        ns = self.floor.take(ids)
        self.floor.publish(self.singles, ids)
        self.floor.release(ids)
        return [ns / SINGLES]

    # digest -----------------------------------------------------------------------------------------------------

    def digest(self) -> list[float]:
        """All block digests of the fresh prompts, each computed for the first time."""
        manager, blocks, names = self.manager, self.sizes.blocks, self.second
        for name, tokens in zip(names, self.fresh, strict=True):
            manager.open(name, tokens)
        began = perf_counter_ns()
        for name in names:
            manager.prefix_digests(name, blocks)
        ns = perf_counter_ns() - began
        for name in names:
            manager.release(name)
        return [self.sizes.scale(ns)]

    def floor_digest(self) -> list[float]:
        """The same of the floor."""
        out = np.empty((self.sizes.group, self.sizes.blocks, 32), dtype=np.uint8)
        return [self.sizes.scale(self.floor.digest(self.fresh, self.sizes.blocks, ROOT_DIGEST, out))]


def expect(found: int, wanted: int) -> None:
    """A benchmark that measures misses as hits must not report."""
    if found != wanted:
        raise RuntimeError(f"the benchmark found {found} where {wanted} are cached; its figures would mean nothing")
