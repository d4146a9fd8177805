"""Attention over the paged cache beside the roofline of the machine, for every storage type.

    python benchmarks/attention.py [--quick] [--json] [--only TEXT]

    decode_{type}_{context}_b{batch}   one token a request; 32 query heads, 8 kv heads of 128
    mla_decode_{type}_{context}        absorbed form: 16 heads, 512 + 64
    prefill_{type}_{tokens}            one prompt from nothing
    write_{type}                       quantise (from bfloat16) and scatter 2048 tokens
    gather_{type}                      dequantise 2048 tokens of scattered blocks to float32, into given tensors
    copy_blocks_{type}                 copy 32 blocks
    record_gather_{type}               blocks of 28 layers to host records; record_scatter_{type}, record_floor_{type}:
                                       back, and a plain loop of streaming stores (record_rows.py)
    speedup_{type}                     decode of 8 requests at 16k beside our own bfloat16; bound 1.0
    paddle_..., torch_...              the same shapes in Paddle and in torch, where a kernel exists and is installed

The bound of attention is the roofline max(bytes / stream read, operations / multiply-add peak), as a rate in the row's
unit; that of the others is memcpy, reading and writing counted. Both are measured in turns with the kernel, on the same
threads and in memory of the same kind; rows are medians. Layers take turns, so that no cache is warm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from common import Row, add_arguments, interleave, print_rows, progress

from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import

prepare_runtime()
with quiet_paddle_import():
    import paddle

import attention_peers as peers  # noqa: E402 - Paddle must be imported after prepare_runtime
import numpy as np  # noqa: E402
from attention_cases import BLOCK_SIZE, GQA, MLA, Layers, Shape, make_batch, random_rows  # noqa: E402
from floor.attention_floor import AttentionFloor  # noqa: E402
from record_rows import measure_records  # noqa: E402

from fastkv.ops import append_attention, copy_blocks, gather_cache, mla_append_attention, write_cache  # noqa: E402

CONTEXTS = {"4k": 4096, "16k": 16384, "64k": 65536}
PROMPTS = {"512": 512, "2k": 2048, "8k": 8192}
TYPES = (
    *("f32", "bf16", "f16", "int8", "int8_zp", "float8_e4m3fn", "float8_e4m3fn_zp", "block_wise_fp8", "int4_zp"),
    "int8_token",
)
MLA_TYPES = ("f32", "bf16", "f16", "float8_e4m3fn")
QUICK_TYPES = ("f32", "bf16", "int8", "block_wise_fp8", "int4_zp")
RECORD_TYPES = (
    "f32",
    "bf16",
    "int8",
    "int8_token",
    "int4_zp",
    "bf16_tp8",
    "int8_token_tp8",
)  # sizes, whatever they hold
MOVED_TOKENS = 2048
MOVED_BLOCKS = 32
TARGETS = {"f32": 0.8, "bf16": 0.8, "f16": 0.8, "int8": 0.6, "block_wise_fp8": 0.6, "int4_zp": 0.55}
PREFILL_TARGET = 0.6
SPEEDUPS = {"int8": 1.5, "int4_zp": 2.0}
MIN_SAMPLES = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One attention row to measure."""

    name: str
    type: str
    batch: int
    context: int
    queries: int
    shape: Shape = GQA

    @property
    def flops(self) -> float:
        """Floating-point operations: two for each multiply-add of a query head with a position that it attends."""
        pairs = self.queries * self.context + self.queries * (self.queries + 1) / 2
        return 2.0 * self.batch * pairs * self.shape.num_heads * (self.shape.head_dim + self.shape.value_dim)


def cases(quick: bool) -> Iterator[Case]:
    """Every attention row."""
    types = QUICK_TYPES if quick else TYPES
    for name in types:
        for label, context in CONTEXTS.items():
            for batch in (1, 8):
                if not quick or (label, batch) in (("4k", 1), ("16k", 1)):
                    yield Case(f"decode_{name}_{label}_b{batch}", name, batch, context, 1)
    for name in ("bf16",) if quick else MLA_TYPES:
        for label, context in CONTEXTS.items():
            if not quick or label == "16k":
                yield Case(f"mla_decode_{name}_{label}", name, 1, context, 1, MLA)
    for name in ("bf16",) if quick else TYPES:
        for label, tokens in PROMPTS.items():
            if label != "8k" if quick else (label != "8k" or name in ("f32", "bf16", "int8")):
                yield Case(f"prefill_{name}_{label}", name, 1, 0, tokens)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = perf_counter()
    call()
    return perf_counter() - start


def measure_attention(case: Case, floor: AttentionFloor, budget_s: float) -> list[Row]:
    """Our row, and those of the peers that can do the same."""
    batch, num_blocks = make_batch(case.batch, case.context, case.queries)
    tokens = case.batch * (case.context + case.queries)
    layers = Layers(case.type, case.shape, num_blocks, tokens)
    shape, new = case.shape, case.batch * case.queries
    q = random_rows([new, shape.num_heads, shape.head_dim], layers.dtype)
    k = random_rows([new, shape.kv_heads, shape.head_dim], layers.dtype)
    scale = shape.head_dim**-0.5

    def ours() -> list[float]:
        cache = layers.take()
        if shape.is_latent:
            rows, rank = k.reshape([new, -1]), shape.value_dim
            call = lambda: mla_append_attention(q, rows, cache, batch, kv_lora_rank=rank, softmax_scale=scale)  # noqa: E731
        else:
            call = lambda: append_attention(q, k, k, cache, batch, softmax_scale=scale)  # noqa: E731
        return [timed(call)]

    def bounds() -> list[float]:
        return [floor.read(layers.take_memory()), floor.multiply_add()]

    samplers: list[Callable[[], Sequence[float]]] = [ours, bounds]
    rivals = peers.attention(case.type, case.batch, case.context, case.queries, shape)
    samplers += [rival.sample for rival in rivals]
    (seconds,), (read, peak), *others = interleave(samplers, budget_s, min_samples=MIN_SAMPLES)
    work, unit = (case.flops, "GFLOP/s") if case.queries > 1 or shape.is_latent else (layers.bytes_read, "GB/s")
    roofline = max(layers.bytes_read / read, case.flops / peak)
    rows = [Row.rate(case.name, work / seconds / 1e9, unit, work / roofline / 1e9)]
    for rival, (rival_s,) in zip(rivals, others, strict=True):
        rows.append(Row.rate(f"{rival.name}_{case.name}", work / rival_s / 1e9, unit, work / roofline / 1e9))
    return rows


def measure_speedup(name: str, budget_s: float, batch: int) -> Row:
    """Decode at 16k in one type beside the same in bfloat16."""
    step, num_blocks = make_batch(batch, CONTEXTS["16k"], 1)
    samplers = []
    for kind in (name, "bf16"):
        layers = Layers(kind, GQA, num_blocks, batch * (CONTEXTS["16k"] + 1))
        q = random_rows([batch, GQA.num_heads, GQA.head_dim], "bfloat16")
        k = random_rows([batch, GQA.kv_heads, GQA.head_dim], "bfloat16")

        def sample(layers: Layers = layers, q: paddle.Tensor = q, k: paddle.Tensor = k) -> list[float]:
            cache = layers.take()
            return [timed(lambda: append_attention(q, k, k, cache, step, softmax_scale=0.088))]

        samplers.append(sample)
    (quantised,), (plain,) = interleave(samplers, budget_s, min_samples=MIN_SAMPLES)
    return Row.rate(f"speedup_{name}", plain / quantised, "x", 1.0)


def measure_moves(name: str, floor: AttentionFloor, budget_s: float) -> list[Row]:
    """Write, gather and block copies of one type, beside memcpy."""
    num_blocks = 4 * MOVED_TOKENS // BLOCK_SIZE
    layers = Layers(name, GQA, num_blocks, 4 * MOVED_TOKENS)
    rng = np.random.default_rng(2)
    # as a prompt lies: whole blocks, scattered
    written = rng.permutation(num_blocks)[: MOVED_TOKENS // BLOCK_SIZE]
    slots = paddle.to_tensor((written[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1))
    blocks = rng.permutation(num_blocks)[: 2 * MOVED_BLOCKS].reshape(2, -1)
    source, target = (paddle.to_tensor(ids.copy()) for ids in blocks)
    k, v = (random_rows([MOVED_TOKENS, GQA.kv_heads, GQA.head_dim], layers.dtype) for _ in range(2))
    stored = layers.bytes_read // (4 * MOVED_TOKENS) * MOVED_TOKENS
    elements = 2 * MOVED_TOKENS * GQA.kv_heads * GQA.head_dim
    moved_bytes = 2 * MOVED_BLOCKS * layers.bytes_read // num_blocks
    a, b = np.ones((2, 16 << 20), np.uint8)  # zeros that nobody wrote are one page of the system, read from a cache

    def write() -> list[float]:
        cache = layers.take()
        return [timed(lambda: write_cache(k, v, cache, slots))]

    out = tuple(paddle.zeros([MOVED_TOKENS, GQA.kv_heads, GQA.head_dim]) for _ in range(2))

    def gather() -> list[float]:
        cache = layers.take()
        return [timed(lambda: gather_cache(cache, slots, out))]

    def copy() -> list[float]:
        cache = layers.take()
        tensors = [t for t in (cache.key, cache.value, cache.key_scale, cache.value_scale) if t is not None]
        return [timed(lambda: copy_blocks(tensors, source, target))]

    (write_s,), (gather_s,), (copy_s,), (bound,) = interleave(
        [write, gather, copy, lambda: [floor.copy(a, b)]], budget_s, min_samples=MIN_SAMPLES
    )
    item = 2 if k.dtype != paddle.float32 else 4
    return [
        Row.rate(f"write_{name}", (elements * item + stored) / write_s / 1e9, "GB/s", bound / 1e9),
        Row.rate(f"gather_{name}", (stored + elements * 4) / gather_s / 1e9, "GB/s", bound / 1e9),
        Row.rate(f"copy_blocks_{name}", moved_bytes / copy_s / 1e9, "GB/s", bound / 1e9),
    ]


def judge(rows: Sequence[Row]) -> list[str]:
    """How the rows stand to the targets that the project has set itself."""
    notes, named = [], {row.name: row for row in rows}
    for row in rows:
        kind, _, rest = row.name.partition("_")
        target = next((TARGETS[t] for t in TARGETS if kind == "decode" and rest.startswith(f"{t}_")), None)
        if rest.startswith(("int8_zp", "int8_token")):
            target = None
        target = PREFILL_TARGET if kind == "prefill" else SPEEDUPS.get(rest) if kind == "speedup" else target
        if target is not None and row.ratio < target:
            notes.append(f"below its target of {target}: {row.name} {row.ratio:.2f}")
        if kind in ("paddle", "torch") and (mine := named.get(rest)):
            notes.append(f"{rest}: {mine.value / row.value:.1f}x as fast as {kind}")
    return notes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="attention over the paged cache beside the machine's roofline")
    add_arguments(parser)
    args = parser.parse_args(argv)
    budget_s = 0.3 if args.quick else 1.5
    floor = AttentionFloor()
    rows: list[Row] = []
    for case in cases(args.quick):
        if args.only in case.name:
            progress(f"measuring {case.name}")
            rows += measure_attention(case, floor, budget_s)
    for name in QUICK_TYPES if args.quick else TYPES:
        if any(args.only in f"{kind}_{name}" for kind in ("write", "gather", "copy_blocks")):
            progress(f"measuring moves of {name}")
            rows += [row for row in measure_moves(name, floor, budget_s) if args.only in row.name]
    for name in ("bf16", "int8_token") if args.quick else RECORD_TYPES:
        if any(args.only in f"record_{way}_{name}" for way in ("gather", "scatter", "floor")):
            progress(f"measuring records of {name}")
            rows += [row for row in measure_records(name, budget_s) if args.only in row.name]
    for name in SPEEDUPS:
        if args.only in f"speedup_{name}":
            progress(f"measuring the speed-up of {name}")
            rows.append(measure_speedup(name, budget_s, 2 if args.quick else 8))
    progress("")
    threads = f"{floor.num_threads} threads; peers: {', '.join(peers.installed())}"
    print_rows(rows, args.json, [threads, *judge(rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
