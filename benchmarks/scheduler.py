"""Nanoseconds a block of the scheduler's bookkeeping, beside a C++ floor that does only the unavoidable memory work.

    python benchmarks/scheduler.py [--quick] [--json] [--only TEXT]

Rows are named `{what}_{prompt}_{block}_{pool}`: tokens of the prompt, tokens of a block, blocks of the pool. Prompts of
a row are spread over the whole pool and visited in turn, so a large pool is as cold as it is in service.

    match     look up a full hit that somebody else holds          floor: hash, table, compare
    acquire   look up a full hit that nobody holds                 floor: as match, and leave the LRU list
    release   give such a hit back                                 floor: enter the LRU list
    hit       open, acquire and release together                   floor: acquire + release
    allocate  take free blocks into a row of a block table         floor: pop ids
    publish   make a prompt's blocks findable                      floor: hash, insert, copy the tokens
    admit     allocate and publish in a full pool, so evict too    floor: pop from the LRU list, erase, publish
    life      open, match a half-cached prompt, admit the rest,    floor: match, acquire, admit, release
              release, in a full pool
    digest    chained SHA-256 of every block                       floor: the same with the CPU's SHA instructions

    evict_one_16_{pool}          allocate one block from a full pool
    evict_growth_16              that from 1e6 blocks over that from 1e4; bound: the floor's own growth
    call_{what}                  one call for one block: the fixed cost; bound: an empty Python method
    bookkeeping_{block}_{pool}   bytes a block without its tokens
    peer_{who}_{what}_...        the same work in another engine, where it is installed

Times of fastkv and of peers include the Python calls; the floor is timed inside C++. One process, one thread. Where a
prompt's nodes lie in a row, match compares without hashing, which the floor does not: its ratio can pass 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from time import perf_counter_ns

import scheduler_peers
from common import Row, add_arguments, interleave, print_rows, progress
from scheduler_cases import Bench, Sizes

PROMPTS = {"1k": 1024, "8k": 8192, "128k": 131072}
POOLS = {"1e4": 10**4, "1e5": 10**5, "1e6": 10**6}
BLOCKS = (16, 64)
FULL = [(prompt, block, pool) for pool in POOLS for block in BLOCKS for prompt in PROMPTS]
QUICK = [case for case in FULL if case[2] == "1e5" or case in (("8k", 64, "1e4"), ("8k", 16, "1e6"), ("8k", 64, "1e6"))]
CALLS = ("open", "match", "allocate", "publish", "release")
MAX_CALL_NS = 3000.0
MAX_BOOKKEEPING_BYTES = 128.0
MAX_EVICT_GROWTH = 10.0
MIN_RATIO = 0.5


def measure(sizes: Sizes, budget_s: float) -> Iterator[Row]:
    """All rows of one prompt, block and pool."""
    bench = Bench(sizes)

    def rows(names: Sequence[str], *samplers: Callable[[], Sequence[float]], warmup: int = 1) -> Iterator[Row]:
        ours, floor = interleave(samplers, budget_s, warmup_rounds=warmup)
        for name, value, bound in zip(names, ours, floor, strict=True):
            yield Row.cost(f"{name}_{sizes.label}", value, "ns/block", bound)

    # allocate wants free blocks, the others a full pool
    spare = max(0, sizes.num_prompts - sizes.group)
    bench.fill(range(spare))
    yield from rows(["allocate"], bench.allocate, bench.floor_allocate)
    bench.fill(range(spare, sizes.num_prompts))
    hits, floor_hits = bench.hits(), bench.floor_hits()
    yield from rows(["match", "acquire", "release", "hit"], hits.__next__, floor_hits.__next__)
    hits.close()
    floor_hits.close()
    yield from rows(["life"], bench.lives().__next__, bench.floor_lives().__next__, warmup=3)
    yield from rows(["evict", "publish", "admit"], bench.admit, bench.floor_admit, warmup=3)
    yield from rows(["digest"], bench.digest, bench.floor_digest)
    if sizes.prompt == PROMPTS["8k"]:
        per_block = bench.manager.bookkeeping_bytes() / sizes.pool
        name = f"bookkeeping_{sizes.label.partition('_')[2]}"
        yield Row.cost(name, per_block, "B/block", bench.floor.bytes / sizes.pool)
    bench.close()


def measure_single_evictions(pools: Sequence[str], budget_s: float) -> list[Row]:
    """One block at a time out of full pools, and how that grows from the smallest pool to the largest."""
    rows = []
    for pool in pools:
        bench = Bench(Sizes("", PROMPTS["8k"], 16, POOLS[pool]))
        bench.fill(range(bench.sizes.num_prompts))
        ours, floor = interleave([bench.evict_one, bench.floor_evict_one], budget_s, min_samples=20, warmup_rounds=5)
        rows.append(Row.cost(f"evict_one_16_{pool}", ours[0], "ns/block", floor[0]))
        bench.close()
    growth, floor_growth = (getattr(rows[-1], key) / getattr(rows[0], key) for key in ("value", "bound"))
    return [*rows, Row.cost("evict_growth_16", growth, "x", floor_growth)]


class _Empty:
    def call(self, name: str, count: int) -> None:
        """What a Python call costs that does nothing."""


def measure_calls(budget_s: float) -> list[Row]:
    """Fixed cost of a call: prompts of one block that are found, one more block from the free list."""
    bench = Bench(Sizes("", 16, 16, 2048))
    bench.fill(range(bench.sizes.num_prompts // 2))
    manager, names = bench.manager, bench.single
    prompts, empty = list(bench.prompts[: len(names)]), _Empty()

    def ours() -> list[float]:
        marks = [perf_counter_ns()]
        for name, row in zip(names, prompts, strict=True):
            manager.open(name, row)
        marks.append(perf_counter_ns())
        for name in names:
            manager.match(name)
        marks.append(perf_counter_ns())
        for name in names:
            manager.allocate(name, 1)
        marks.append(perf_counter_ns())
        for name in names:
            manager.publish(name, 16)
        marks.append(perf_counter_ns())
        for name in names:
            manager.release(name)
        marks.append(perf_counter_ns())
        return [(after - before) / len(names) for before, after in pairwise(marks)]

    def bound() -> list[float]:
        began = perf_counter_ns()
        for name in names:
            empty.call(name, 1)
        return [(perf_counter_ns() - began) / len(names)]

    values, (nothing,) = interleave([ours, bound], budget_s, min_samples=20)
    bench.close()
    return [Row.cost(f"call_{name}", value, "ns", nothing) for name, value in zip(CALLS, values, strict=True)]


def judge(rows: Sequence[Row]) -> list[str]:
    """How the rows stand to the targets that the project has set itself."""
    notes = []
    long = [row for row in rows if row.unit == "ns/block" and row.name.split("_")[1] in ("8k", "128k")]
    ours = [row for row in long if not row.name.startswith("peer")]
    low = sorted((row for row in ours if row.ratio < MIN_RATIO), key=lambda row: row.ratio)
    if ours:
        notes.append(f"{len(ours) - len(low)} of {len(ours)} rows at 8k and 128k reach {MIN_RATIO} of the floor")
        notes += [f"  below: {row.name} {row.ratio:.2f}" for row in low]
    named = {row.name: row for row in rows}
    if growth := named.get("evict_growth_16"):
        notes.append(f"evicting one block: {growth.value:.1f}x from 1e4 to 1e6 blocks (limit {MAX_EVICT_GROWTH:.0f}x)")
    calls = [row for row in rows if row.name.startswith("call_")]
    if calls:
        slowest = max(calls, key=lambda row: row.value)
        notes.append(f"dearest call: {slowest.name} {slowest.value:.0f} ns (limit {MAX_CALL_NS:.0f} ns)")
    sizes = [row for row in rows if row.unit == "B/block"]
    if sizes:
        most = max(row.value for row in sizes)
        notes.append(f"bookkeeping: at most {most:.0f} bytes a block (limit {MAX_BOOKKEEPING_BYTES:.0f})")
    for row in rows:
        if row.name.startswith("peer_"):
            _, who, rest = row.name.split("_", 2)
            if mine := named.get(rest):
                notes.append(f"{rest}: {row.value / mine.value:.1f}x faster than {who}")
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="nanoseconds a block of the scheduler's bookkeeping")
    add_arguments(parser)
    args = parser.parse_args(argv)
    budget_s = 0.15 if args.quick else 0.6
    rows: list[Row] = []
    peers, absent = scheduler_peers.installed()
    for prompt, block, pool in QUICK if args.quick else FULL:
        sizes = Sizes(f"{prompt}_{block}_{pool}", PROMPTS[prompt], block, POOLS[pool])
        progress(f"measuring {sizes.label}")
        rows += measure(sizes, budget_s)
        for peer in peers:
            progress(f"measuring {peer.name} {sizes.label}")
            rows += scheduler_peers.measure(peer, sizes, budget_s, {row.name: row.bound for row in rows})
    progress("measuring single evictions and calls")
    rows += measure_single_evictions(["1e4", "1e6"] if args.quick else list(POOLS), budget_s)
    rows += measure_calls(budget_s)
    progress("")
    rows = [row for row in rows if args.only in row.name]
    print_rows(rows, args.json, [*judge(rows), *absent])
    return 0


if __name__ == "__main__":
    sys.exit(main())
