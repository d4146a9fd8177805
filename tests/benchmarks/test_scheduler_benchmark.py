"""The floor does the job it stands for, and the benchmark prints what it promises."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import scheduler
from floor.scheduler_floor import SchedulerFloor
from scheduler_cases import Bench, Sizes, expect

BLOCK, BLOCKS = 16, 24
ROOT = hashlib.sha256(b"any root").digest()


def prompts(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (count, BLOCK * BLOCKS), dtype=np.int32)


def room(count: int) -> np.ndarray:
    return np.full((count, BLOCKS), -1, dtype=np.int32)


def test_floor_finds_exactly_the_blocks_that_were_published() -> None:
    floor, rows, ids = SchedulerFloor(100, BLOCK), prompts(3), room(3)
    assert floor.take(ids) > 0
    assert len(np.unique(ids)) == ids.size
    floor.publish(rows, ids)
    found = room(3)
    assert floor.match(rows, BLOCKS, found)[1] == ids.size
    assert (found == ids).all()
    rows[1, 5 * BLOCK + 3] += 1  # blocks 5 and later of prompt 1 now have another content or prefix
    assert floor.match(rows, BLOCKS, room(3))[1] == ids.size - (BLOCKS - 5)
    assert floor.match(prompts(1, seed=9), BLOCKS, room(1))[1] == 0


def test_floor_evicts_the_least_recently_used_prompt_deepest_block_first() -> None:
    floor, rows, ids = SchedulerFloor(3 * BLOCKS, BLOCK), prompts(3), room(3)
    floor.take(ids)
    floor.publish(rows, ids)
    floor.release(ids)
    again = room(1)
    floor.acquire(rows[:1], BLOCKS, again)  # prompt 0 is used again, so prompt 1 is the oldest
    floor.release(again)
    taken = room(1)[:, :4].copy()
    floor.take(taken)
    assert taken[0].tolist() == ids[1, ::-1][:4].tolist()
    assert floor.match(rows, BLOCKS, room(3))[1] == ids.size - 4


def test_floor_life_publishes_what_was_missing_and_holds_nothing() -> None:
    floor, rows, ids = SchedulerFloor(2 * BLOCKS, BLOCK), prompts(2), room(2)
    floor.life(rows, ids)
    assert floor.num_free == 0
    rows[1, : 12 * BLOCK] = rows[0, : 12 * BLOCK]
    for _ in range(3):  # a hit on half of prompt 0, and the rest evicts what is oldest, over and over
        floor.life(rows[1:], room(1))
        assert floor.match(rows[1:], BLOCKS, room(1))[1] == BLOCKS
        floor.life(rows[:1], room(1))
    assert floor.match(rows[:1], BLOCKS, room(1))[1] == BLOCKS


def test_floor_digest_is_the_documented_chain() -> None:
    floor, rows = SchedulerFloor(8, BLOCK), prompts(1)
    out = np.empty((1, BLOCKS, 32), dtype=np.uint8)
    floor.digest(rows, BLOCKS, ROOT, out)
    digest = ROOT
    for block in range(BLOCKS):
        piece = rows[0, block * BLOCK : (block + 1) * BLOCK].tobytes()
        digest = hashlib.sha256(digest + bytes(4) + piece).digest()
        assert out[0, block].tobytes() == digest


def test_bench_measures_every_row_of_a_small_case() -> None:
    sizes = Sizes("tiny_16_1e3", 8192, 16, 1100)
    rows = {row.name: row for row in scheduler.measure(sizes, budget_s=0.0)}
    promised = ("match", "acquire", "allocate", "admit", "publish", "release", "digest", "life", "hit", "evict")
    assert set(rows) == {f"{name}_tiny_16_1e3" for name in promised} | {"bookkeeping_16_1e3"}
    for row in rows.values():
        assert row.value > 0
        assert row.bound > 0
        assert row.ratio == pytest.approx(row.bound / row.value)
    assert rows["admit_tiny_16_1e3"].bound >= rows["publish_tiny_16_1e3"].bound


@pytest.mark.parametrize(("prompt", "pool"), [(64, 4096), (256, 90), (256, 16), (256, 40)])
def test_bench_keeps_manager_and_floor_in_step(prompt: int, pool: int) -> None:
    """Prompts that fill the pool, leave a rest, or are the whole pool: every sampler runs and finds what it must."""
    bench = Bench(Sizes("", prompt, 16, pool))
    bench.fill(range(bench.sizes.num_prompts))
    hits, floor_hits = bench.hits(), bench.floor_hits()
    for _ in range(5):
        assert len(next(hits)) == len(next(floor_hits)) == 4
    hits.close()
    floor_hits.close()
    assert bench.manager.stats().held == 0
    lives, floor_lives = bench.lives(), bench.floor_lives()
    for _ in range(3 * bench.sizes.num_prompts // bench.sizes.group):
        next(lives)
        next(floor_lives)
    for _ in range(5):
        bench.admit()
        bench.floor_admit()
        if pool >= 256:
            bench.evict_one()
            bench.floor_evict_one()
    assert bench.manager.stats().open_requests == 0
    bench.manager.check_integrity()


def test_bench_that_does_not_find_its_prompts_refuses_to_report() -> None:
    with pytest.raises(RuntimeError, match="found 3 where 4 are cached"):
        expect(3, 4)


def test_cases_cover_the_sizes_of_the_targets() -> None:
    assert len(scheduler.FULL) == 18
    assert set(scheduler.QUICK) < set(scheduler.FULL)
    assert {case[0] for case in scheduler.QUICK} == {"1k", "8k", "128k"}
    assert {case[1] for case in scheduler.QUICK} == {16, 64}
