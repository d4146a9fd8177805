"""Matches of long prompts against the model, where node ids are in order, in runs, and in no order at all.

A match follows the tree as long as ids go on in steps of one size, and hashes where they do not; what it finds may not
depend on which. Pools are small, so that ids are used again and prefixes lose their ends.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.scheduler_model import SchedulerModel

from fastkv.core.digest import Identity, ImageSpan
from fastkv.scheduler import CacheManager

BLOCK_SIZE = 2
NUM_BLOCKS = 320
LONGEST = 130  # blocks: some times the segments that are hashed together


class Pair:
    """A manager and its model, given the same calls."""

    def __init__(self, hash_mask: int) -> None:
        self.manager = CacheManager(NUM_BLOCKS, BLOCK_SIZE, hash_mask=hash_mask)
        self.model = SchedulerModel(NUM_BLOCKS, BLOCK_SIZE)

    def start(self, name: str, tokens: list[int], identity: Identity) -> int:
        """Open and match; returns how many blocks were found."""
        self.manager.open(name, np.array(tokens, dtype=np.int32), identity)
        self.model.open(name, tokens, identity)
        found = self.manager.match(name)
        assert found.device_blocks.size == self.model.match(name)
        assert found.device_blocks.tolist() == self.model.requests[name].table
        return int(found.device_blocks.size)

    def compute(self, name: str, num_blocks: int) -> None:
        """Allocate that many blocks and publish them, as far as there are tokens."""
        request = self.model.requests[name]
        num_blocks = min(num_blocks, -(-len(request.tokens) // BLOCK_SIZE) - len(request.table))
        if num_blocks > self.model.available():
            return
        self.model.allocate(name, num_blocks, self.manager.allocate(name, num_blocks).tolist())
        computed = min(len(request.tokens), len(request.table) * BLOCK_SIZE)
        assert self.manager.publish(name, computed) == self.model.publish(name, computed)

    def finish(self, name: str) -> None:
        self.manager.release(name)
        self.model.release(name)


def prompt_like(rng: random.Random, known: list[tuple[list[int], Identity]]) -> tuple[list[int], Identity]:
    """A prompt that goes on from some place of one seen before, one that differs in a picture only, or a new one."""
    length = rng.randrange(1, LONGEST * BLOCK_SIZE)
    fresh = [rng.randrange(3) for _ in range(length)]
    what = rng.random()
    if known and what < 0.6:
        tokens, identity = rng.choice(known)
        cut = rng.choice([len(tokens), rng.randrange(len(tokens) + 1)])
        images = tuple(image for image in identity.images if image.end <= cut)
        return tokens[:cut] + fresh[: rng.choice([1, 5, length])], Identity(images=images)
    tokens = rng.choice(known)[0] if known and what < 0.8 else fresh
    start = rng.randrange(len(tokens))
    return tokens, Identity(images=(ImageSpan(rng.choice([b"cat", b"dog"]), start, min(start + 3, len(tokens))),))


@pytest.mark.parametrize(("seed", "hash_mask"), [(0, 2**64 - 1), (1, 2**64 - 1), (2, 0xF)])
def test_long_matches_over_ids_in_any_order_equal_the_model(seed: int, hash_mask: int) -> None:
    rng = random.Random(seed)
    pair, known, matched = Pair(hash_mask), list[tuple[list[int], Identity]](), list[int]()
    for turn in range(40):
        names = [f"{turn}-{i}" for i in range(rng.choice([1, 1, 2, 3]))]
        for name in names:
            known.append(prompt_like(rng, known[-12:]))
            matched.append(pair.start(name, *known[-1]))
        # one after the other: ids in a row; in turns: in runs of that length
        run = rng.choice([1, 3, 20, LONGEST])
        for _ in range(0, LONGEST, run):
            for name in names:
                pair.compute(name, run)
        for name in names:
            pair.finish(name)
        if turn % 10 == 0:
            pair.manager.check_integrity()
    assert sum(blocks > 40 for blocks in matched) > 5, "the scenario finds nothing long"


def test_match_of_a_run_ends_where_its_end_was_evicted() -> None:
    """An unbroken run of ids, evicted from its end on, one block at a time."""
    pair = Pair(2**64 - 1)
    tokens = [token % 7 for token in range(100 * BLOCK_SIZE + 1)]
    pair.start("first", tokens, Identity())
    pair.compute("first", 100)
    pair.finish("first")
    for left in range(99, -1, -1):
        assert pair.manager.evict(1) == 1
        pair.manager.open("again", tokens)
        assert pair.manager.match("again").num_tokens == left * BLOCK_SIZE
        pair.manager.release("again")
