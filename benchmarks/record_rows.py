"""Gather and scatter of block records beside memcpy, for benchmarks/attention.py: rows record_gather_{type} (device to
host), record_scatter_{type} (host to device) and record_floor_{type}.

A model of 28 layers with 8 kv heads of 128 and blocks of 64 tokens, or one rank's share of it; some 64 MiB a copy, from
and to random places of pools that no cache holds. What is timed is what the copy engine calls. memcpy moves as many
bytes between two arrays, on as many threads of its own: Paddle's would spin on while records are copied. The floor does
so past the caches, in a plain loop: no kernel can be much better.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
from attention_cases import BLOCK_SIZE, MODEL_DTYPES
from common import Row, interleave, load_floor

from fastkv import parse_config
from fastkv.worker.records import Direction, RecordCopier
from fastkv.worker.tensors import allocate_group, allocate_host_records

NUM_LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
MOVED_BYTES = 64 << 20
POOL = 3  # times as many blocks as one copy moves
THREADS = 2
MIN_SAMPLES = 9

Ids = npt.NDArray[np.int32]


class RecordMoves:
    """Pools of one type on the device and on the host, memory for memcpy, and what copies them.

    Args:
        name: storage type, or "{type}_tp{n}" for one of n tensor-parallel ranks.
    """

    def __init__(self, name: str) -> None:
        kind, _, ranks = name.partition("_tp")
        model = {"name": "bench", "attention": "mha", "num_attention_heads": KV_HEADS, "num_kv_heads": KV_HEADS}
        model |= {"head_dim": HEAD_DIM, "num_layers": NUM_LAYERS, "max_context": 4096}
        model["dtype"] = MODEL_DTYPES.get(kind, "bfloat16")
        quant_type = None if kind in MODEL_DTYPES else kind
        cache = {"block_size": BLOCK_SIZE, "num_device_blocks": 1, "kv_cache_quant_type": quant_type}
        parallel = {"tensor_parallel_size": int(ranks or 1)}
        spec = parse_config({"model": model, "cache": cache, "parallel": parallel}).cache_spec()
        self.block_bytes = spec.block_bytes
        self.count = MOVED_BYTES // spec.block_bytes
        self.pool = POOL * self.count
        tensors = allocate_group(spec.groups[0], self.pool, "cpu")
        self.host = allocate_host_records(spec, self.pool, pinned=False)
        self.host[:] = 1  # zeros that nobody wrote are one page of the system, read from a cache
        self.copier = RecordCopier(spec, tensors, self.pool, self.host, THREADS)
        everything = np.arange(self.pool, dtype=np.int32)
        self.copy(Direction.TO_DEVICE, everything, everything)
        self.memory = np.ones((2, 2, self.count * spec.block_bytes // 2 // 4096 * 4096), np.uint8)
        self.native = load_floor(Path(__file__).with_name("floor") / "tiers_floor.cc", "-pthread")
        self.rng = np.random.default_rng(0)

    def copy(self, direction: Direction, blocks: Ids, records: Ids) -> None:
        """As the copy engine calls it: loads tell which layers have landed."""
        landed: Callable[[int], None] | None = (lambda _: None) if direction is Direction.TO_DEVICE else None
        self.copier.prepare(len(blocks))
        self.copier.copy(direction, blocks, records, range(NUM_LAYERS), landed)

    def sample(self, direction: Direction) -> list[float]:
        """Bytes a second, read plus written, of one copy between random places."""
        blocks, records = (self.rng.permutation(self.pool)[: self.count].astype(np.int32) for _ in range(2))
        start = perf_counter()
        self.copy(direction, blocks, records)
        return [2 * self.count * self.block_bytes / (perf_counter() - start)]

    def plain(self, streams: bool) -> list[float]:
        """Bytes a second, read plus written, of memcpy or of streaming stores: each thread one half of an array."""
        source, target = self.memory
        half = source.shape[1]
        part, ids = np.array([[source.ctypes.data, half, half, 0]], np.int64), np.arange(2, dtype=np.int32)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        start = perf_counter()
        self.native.floor_move(
            *(pointer(part.ctypes.data), number(1), pointer(target.ctypes.data), number(half)),
            *(pointer(ids.ctypes.data), pointer(ids.ctypes.data), number(2), 0, int(streams), THREADS),
        )
        return [2 * source.nbytes / (perf_counter() - start)]


def measure_records(name: str, budget_s: float) -> list[Row]:
    """The rows of one type."""
    moves = RecordMoves(name)
    samplers = {
        "gather": lambda: moves.sample(Direction.TO_HOST),
        "scatter": lambda: moves.sample(Direction.TO_DEVICE),
        "floor": lambda: moves.plain(streams=True),
    }
    *rates, (bound,) = interleave([*samplers.values(), lambda: moves.plain(streams=False)], budget_s, MIN_SAMPLES)
    moves.copier.close()
    return [
        Row.rate(f"record_{what}_{name}", rate / 1e9, "GB/s", bound / 1e9)
        for what, (rate,) in zip(samplers, rates, strict=True)
    ]
