"""Traces made on the spot, and what a cache of any size would find in them, computed with one dict."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass


@dataclass
class Line:
    """One request of a trace."""

    timestamp: int
    input_length: int
    hash_ids: list[int]

    def json(self) -> str:
        return json.dumps({**self.__dict__, "output_length": 7})


def make_trace(num_requests: int, block_tokens: int, seed: int) -> list[Line]:
    """Conversations that come back longer and long prompts that do not, some ending exactly on a block."""
    rng = random.Random(seed)
    conversations: list[list[int]] = [[] for _ in range(6)]
    next_id, lines = 1, []
    for number in range(num_requests):
        history = conversations[rng.randrange(len(conversations))]
        if rng.random() < 0.2:
            history = history[: rng.randrange(len(history) + 1)]  # an edited question: branches off
        partial = rng.randrange(block_tokens)
        num_blocks = len(history) + rng.randrange(4) + (not history)
        ids = history + list(range(next_id, next_id + num_blocks - len(history)))
        next_id += num_blocks - len(history)
        length = num_blocks * block_tokens - partial
        lines.append(Line(number * 10, length, ids))
        if rng.random() < 0.7 and num_blocks < 24:
            history[:] = ids[: length // block_tokens]
        elif num_blocks >= 24:
            history.clear()
    return lines


def naive_replay(lines: list[Line], block_tokens: int, limit: int | None = None) -> tuple[int, int]:
    """(hit blocks, evictions) of leaf-first LRU over prefixes; limit None is unbounded."""
    cached: dict[tuple[int, ...], None] = {}  # in the order in which they would be evicted
    hits = evictions = 0
    for line in sorted(lines, key=lambda each: each.timestamp):
        ids = tuple(line.hash_ids)
        if limit is not None and len(ids) > limit:
            continue
        most = (line.input_length - 1) // block_tokens
        found = 0
        while found < most and ids[: found + 1] in cached:
            found += 1
        hits += found
        held = {ids[: depth + 1] for depth in range(found)}
        while limit is not None and len(cached) + len(ids) - found > limit:
            del cached[next(prefix for prefix in cached if prefix not in held)]
            evictions += 1
        for depth in reversed(range(line.input_length // block_tokens)):
            cached.pop(ids[: depth + 1], None)
            cached[ids[: depth + 1]] = None
    return hits, evictions
