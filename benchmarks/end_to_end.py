"""One decode step of a real model, split into model, attention and cache management.

    python benchmarks/end_to_end.py [--quick] [--json] [--only TEXT] [--config FILE] [--type TYPE]

    step_{context}         one token of one request with that many tokens in the cache
    model_{context}        everything of it that is neither attention nor management
    attention_{context}    the attention calls of all layers: rotary, writing the cache, attending; Python included
    management_{context}   planning the step, block tables, slots, publishing, taking the token
    share_{context}        attention and management as per cent of the step; bound: 10

The engine's own planner, manager and worker run, in one process, on SmolLM2 (configs/smollm2.yaml). Only the prompt is
not computed: its blocks are allocated and published as ever, but hold zeros, which take as long to read as any keys
(written once: pages that never were share one page of the system, which stays in the CPU's caches).
The bound of the first four rows is reading the weights once (step, model), reading the cache once (attention), and an
empty call a layer (management), at the machine's rates, measured in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from common import ROOT, Row, add_arguments, interleave, print_rows, progress

from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import

prepare_runtime()
with quiet_paddle_import():
    import paddle

import numpy as np  # noqa: E402 - Paddle must be imported after prepare_runtime
from floor.attention_floor import AttentionFloor  # noqa: E402

from fastkv import CacheManager, load_config  # noqa: E402
from fastkv.core.messages import StepPlan, StepResult  # noqa: E402
from fastkv.engine.batcher import Batcher, Request  # noqa: E402
from fastkv.engine.sampler import SamplingParams  # noqa: E402
from fastkv.engine.worker import ModelWorker  # noqa: E402

CONTEXTS = (256, 512, 1024, 2048, 4096, 8000)
QUICK_CONTEXTS = (256, 1024)
MAX_SHARE = 10.0  # per cent, at 1024
FLOOR_BYTES = 64 << 20


class TimedModel:
    """A model whose attention calls are timed."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.attention_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def paged_attend(self, *args: Any) -> Any:
        """The model's own, with a clock around every call."""
        attend = self._model.paged_attend(*args)

        def timed(*call: Any) -> Any:
            start = perf_counter()
            result = attend(*call)
            self.attention_s += perf_counter() - start
            return result

        return timed


class Decode:
    """One request of `context` tokens, and its next tokens one at a time."""

    def __init__(self, worker: ModelWorker, block_size: int, context: int, max_context: int) -> None:
        self.worker = worker
        self.model = TimedModel(worker.model)
        worker.model = self.model
        manager = CacheManager(worker.ready.num_device_blocks, block_size)
        self.batcher = Batcher(manager, 1, 512, max_context)
        prompt = np.random.default_rng(context).integers(0, 1000, context).astype(np.int32)
        self.batcher.add(Request("request", prompt, SamplingParams(), max_context, frozenset()))
        while True:  # the prompt, without computing it
            plan = self.batcher.plan()
            is_last = plan.sampling[0] is not None
            token = np.array([1 if is_last else -1], np.int32)
            self.batcher.apply(StepResult(plan.plan_id, token.tobytes(), 0.0))
            if is_last:
                break

    def step(self) -> list[float]:
        """Seconds of one step: all, model, attention, management."""
        self.model.attention_s = 0.0
        start = perf_counter()
        plan: StepPlan = self.batcher.plan()
        planned = perf_counter()
        result = self.worker.handle(plan)
        computed = perf_counter()
        if not isinstance(result, StepResult):
            raise RuntimeError(f"the step failed: {result}")
        self.batcher.apply(result)
        end = perf_counter()
        management = (planned - start) + (end - computed)
        attention = self.model.attention_s
        return [end - start, end - start - management - attention, attention, management]

    def close(self) -> None:
        """Give the worker its own model back."""
        self.worker.model = self.model._model


def measure(worker: ModelWorker, floor: AttentionFloor, config: Any, context: int, budget_s: float) -> list[Row]:
    """All rows of one context."""
    decode = Decode(worker, config.cache.block_size, context, config.model.max_context)
    memory = np.ones(FLOOR_BYTES, np.uint8)
    spec = worker.caches.spec
    group = spec.group("main")
    token_bytes = worker.caches.group_bytes("main") / worker.caches.num_blocks / config.cache.block_size
    weight_bytes = 4.0 * worker.model.geometry.num_parameters

    def nothing() -> list[float]:
        start = perf_counter()
        for _ in group.layers:
            max(0, 1)
        return [perf_counter() - start]

    samplers = [decode.step, lambda: [floor.read(memory)], nothing]
    times, (read,), (empty,) = interleave(samplers, budget_s, min_samples=15, max_samples=60, warmup_rounds=2)
    decode.close()
    weights, cache = weight_bytes / read, token_bytes * context / read
    bounds = {"step": weights + cache, "model": weights, "attention": cache, "management": empty}
    rows = [
        Row.cost(f"{name}_{context}", seconds * 1e3, "ms", bound * 1e3)
        for (name, bound), seconds in zip(bounds.items(), times, strict=True)
    ]
    share = (times[2] + times[3]) / times[0] * 100.0
    return [*rows, Row.cost(f"share_{context}", share, "%", MAX_SHARE)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="a decode step split into model, attention and cache management")
    add_arguments(parser)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smollm2.yaml", help="the engine's config")
    parser.add_argument("--type", default=None, help="kv_cache_quant_type instead of the config's")
    args = parser.parse_args(argv)
    config = load_config(args.config, {} if args.type is None else {"cache.kv_cache_quant_type": args.type})
    progress("loading the model")
    worker, floor = ModelWorker(config), AttentionFloor()
    worker.caches.reset_cache()
    rows: list[Row] = []
    capacity = min(config.model.max_context, worker.ready.num_device_blocks * config.cache.block_size)
    for context in QUICK_CONTEXTS if args.quick else CONTEXTS:
        if context + 100 > capacity:
            continue
        progress(f"measuring {context} tokens")
        rows += measure(worker, floor, config, context, 1.0 if args.quick else 4.0)
    progress("")
    notes = [
        f"{row.name}: {row.value:.1f} % of a step, above {MAX_SHARE:.0f} %"
        for row in rows
        if row.name == "share_1024" and row.value > MAX_SHARE
    ]
    print_rows([row for row in rows if args.only in row.name], args.json, [f"{floor.num_threads} threads", *notes])
    return 0


if __name__ == "__main__":
    paddle.set_device("cpu")
    sys.exit(main())
