"""Conversations that do not fit a small device cache together, engines to run them on, and what they must say.

Shared by tests/engine/test_tiers_*.py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from helpers.engine import TINY, tiny_config

from fastkv import Config
from fastkv.engine.llm import LLM
from fastkv.engine.report import Generation

POLICIES = ["write_through", "write_through_selective", "write_back"]
_rng = np.random.default_rng(17)
SHARED = _rng.integers(0, TINY["vocab_size"], 20).tolist()
# 5 conversations of 40 to 60 tokens, of which 20 are alike; 3 of them fit the device at once
PROMPTS = [SHARED + _rng.integers(0, TINY["vocab_size"], 20 + 5 * i).tolist() for i in range(5)]
ROUNDS = [PROMPTS[:3], PROMPTS[3:], PROMPTS[:2], PROMPTS]
SMALL = {"num_device_blocks": 26, "num_host_blocks": 80, "block_size": 4}


def small(policy: str = "write_through", store: Path | None = None, **cache: Any) -> Config:
    storage = {} if store is None else {"storage": {"path": str(store), "max_bytes": "64MiB", "segment_bytes": "1MiB"}}
    options = {**SMALL, "write_policy": policy, "write_through_threshold": 1, **cache}
    return tiny_config(cache=options, scheduler={"max_batch_size": 3, "max_batch_tokens": 32}, **storage)


def run_rounds(llm: LLM, rounds: list[list[list[int]]] = ROUNDS) -> tuple[list[list[int]], list[Generation]]:
    """Several generate calls on one engine; all token ids, and the generations."""
    generations = [llm.generate(prompts, max_tokens=6) for prompts in rounds]
    llm.manager.check_integrity()
    return [output.token_ids for one in generations for output in one.outputs], generations


def moved(generations: list[Generation], name: str) -> int:
    return sum(getattr(one.report.moved, name) for one in generations)


@cache
def unbounded_text() -> dict[str, list[list[int]]]:
    """Token ids of an unbounded cache, by quantisation type."""
    found = {}
    for quant_type in ("none", "block_wise_fp8", "int8"):
        config = tiny_config(cache={"num_device_blocks": 2000, "block_size": 4, "kv_cache_quant_type": quant_type})
        with LLM(config) as llm:
            found[quant_type] = run_rounds(llm)[0]
    return found
