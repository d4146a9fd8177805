"""The levels below the device beside the bounds of the machine.

    python benchmarks/tiers.py [--quick] [--json] [--only TEXT] [--folder FOLDER]

    offload_{size}, load_{size}   device to host and back through the copy engine, records of that size, in GB/s beside
                                  the best of two plain C loops over the same pieces with as many threads
    file_put, file_get            the file backend beside raw pwrite and pread of the same bytes, records of 1 MiB
    ttft_load_{tokens}            time to the first token of the demo model when its prompt's blocks are on the host, in
                                  ms beside computing the prompt; below the table: the length where both cost alike

The first four are measured in turns with their bounds and are medians (the file rows: the best of several rounds).
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

from common import ROOT, Row, add_arguments, interleave, load_floor, print_rows, progress

from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import

prepare_runtime()
with quiet_paddle_import():
    import paddle  # noqa: F401

import numpy as np  # noqa: E402 - Paddle must be imported after prepare_runtime
from storage_rows import storage_rows  # noqa: E402

from fastkv import CacheController, load_config, parse_config  # noqa: E402
from fastkv.core.spec import Level  # noqa: E402
from fastkv.core.transfers import TransferPlan, stage_of  # noqa: E402
from fastkv.engine.llm import LLM  # noqa: E402

# record -> (layers, KV heads, head_dim), keys and values in float32, blocks of 16 tokens
SIZES = {"64KiB": (4, 2, 64), "1MiB": (16, 4, 128), "4MiB": (32, 8, 128)}
MOVED_BYTES = 64 << 20  # of one measurement
POOL_BYTES = 256 << 20  # of each level: far more than any cache
COPY_TARGET, FILE_TARGET = 0.85, 0.8
THREADS = 2


class CopyBench:
    """Blocks of one size on the device and on the host, and three ways to move them."""

    def __init__(self, size: str) -> None:
        layers, heads, head_dim = SIZES[size]
        record = layers * 2 * heads * head_dim * 16 * 4
        self.count, self.pool = max(1, MOVED_BYTES // record), POOL_BYTES // record
        model = {"num_attention_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
        self.controller = CacheController(
            parse_config(
                {
                    "model": {"name": "bench", "attention": "mha", "dtype": "float32", "num_layers": layers, **model}
                    | {"max_context": 4096},
                    "cache": {"block_size": 16, "num_device_blocks": self.pool, "num_host_blocks": self.pool}
                    | {"copy_threads": THREADS},
                }
            )
        )
        self.controller.initialize_all()
        self.host = self.controller.host_records
        assert self.host.shape[1] == record
        self.host[:] = 1
        tensors = iter(self.controller.get_kv_caches().values())
        rows = [(next(tensors).data_ptr(), part.nbytes, part.nbytes, part.offset) for part in self._parts()]
        self.parts = np.array(rows, dtype=np.int64)
        self.native = load_floor(Path(__file__).with_name("floor") / "tiers_floor.cc", "-pthread")
        self.rng = np.random.default_rng(0)
        self._plan_id = 0
        self._move(Level.HOST, Level.DEVICE, np.arange(self.pool, dtype=np.int32), np.arange(self.pool, dtype=np.int32))

    def close(self) -> None:
        self.controller.free_cache()

    def rates(self, source: Level, budget_s: float) -> tuple[float, float]:
        """(ours, the best plain loop) in GB/s."""
        to_device = source is Level.HOST
        destination = Level.DEVICE if to_device else Level.HOST

        def sample(move: Callable[..., None]) -> Callable[[], tuple[float]]:
            def run() -> tuple[float]:
                blocks, rows = (self.rng.permutation(self.pool)[: self.count].astype(np.int32) for _ in range(2))
                start = perf_counter()
                move(blocks, rows)
                return (self.count * self.host.shape[1] / (perf_counter() - start) / 1e9,)

            return run

        ours = sample(lambda blocks, rows: self._move(source, destination, blocks, rows))
        floors = [sample(lambda b, r, stream=stream: self._floor(b, r, to_device, stream)) for stream in (0, 1)]
        (value,), *bounds = interleave([ours, *floors], budget_s, min_samples=9)
        return value, max(bound for (bound,) in bounds)

    def _parts(self) -> Iterator[object]:
        # get_kv_caches and record_parts both go layer after layer, role after role
        return iter(self.controller.spec.record_parts)

    def _move(self, source: Level, destination: Level, blocks: np.ndarray, rows: np.ndarray) -> None:
        self._plan_id += 1
        ids = (rows, blocks) if source is Level.HOST else (blocks, rows)
        ack = self.controller.submit(TransferPlan(self._plan_id, (stage_of(source, destination, *ids),))).wait(60)
        assert ack.failure is None, ack
        self.controller.take_acks()

    def _floor(self, blocks: np.ndarray, rows: np.ndarray, to_device: bool, stream: int) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.native.floor_move(
            *(pointer(self.parts.ctypes.data), number(len(self.parts))),
            *(pointer(self.host.ctypes.data), number(self.host.shape[1])),
            *(pointer(blocks.ctypes.data), pointer(rows.ctypes.data), number(self.count)),
            *(int(to_device), stream, THREADS),
        )


def copy_rows(quick: bool, only: str) -> Iterator[Row]:
    """offload_{size} and load_{size}."""
    for size in SIZES:
        wanted = {f"offload_{size}": Level.DEVICE, f"load_{size}": Level.HOST}
        wanted = {name: source for name, source in wanted.items() if only in name}
        if not wanted:
            continue
        bench = CopyBench(size)
        for name, source in wanted.items():
            progress(name)
            yield Row.rate(name, *_with_unit(bench.rates(source, 1.0 if quick else 4.0)))
        bench.close()


def file_rows(folder: Path, quick: bool, only: str) -> Iterator[Row]:
    """file_put and file_get."""
    if not any(only in name for name in ("file_put", "file_get")):
        return
    progress("file_put, file_get")
    for row in storage_rows(folder, rounds=5 if quick else 9):
        if only in row.name:
            yield Row.rate(row.name, row.gb_per_s, "GB/s", row.bound_gb_per_s)


def ttft_rows(quick: bool, only: str, notes: list[str]) -> Iterator[Row]:
    """ttft_load_{tokens}, and a note on the break-even length."""
    lengths = [length for length in ((64, 256) if quick else (64, 256, 1024, 4096)) if only in _ttft(length)]
    if not lengths:
        return
    overrides = {"cache.block_size": 16, "cache.device_memory": "1GiB", "cache.host_memory": "1GiB"}
    config = load_config(ROOT / "configs" / "smollm2.yaml", overrides)
    rng = np.random.default_rng(1)
    measured = []
    with LLM(config) as llm:
        llm.generate([rng.integers(0, 40000, 40).tolist()], max_tokens=2)  # loads, compiles, touches
        for length in lengths:
            progress(_ttft(length))
            loads, recomputes = [], []
            for _ in range(3 if length <= 1024 else 2):
                prompt = rng.integers(0, 40000, length + 1).tolist()
                recomputes.append(_seconds(llm, prompt) * 1e3)
                llm.sleep()  # the device forgets, the host does not
                llm.wake()
                loads.append(_seconds(llm, prompt) * 1e3)
            measured.append((length, median(loads), median(recomputes)))
            yield Row.cost(_ttft(length), median(loads), "ms", median(recomputes))
    notes.append(_break_even(measured))


def _seconds(llm: LLM, prompt: list[int]) -> float:
    """Until the first token is there; what follows is not counted."""
    start, first = perf_counter(), []
    llm.generate([prompt], max_tokens=1, on_progress=lambda *_: first.append(perf_counter() - start))
    return first[-1]


def _break_even(measured: list[tuple[int, float, float]]) -> str:
    """Where loading and computing a prompt cost alike, from straight lines through the measured points."""
    if len(measured) < 2:
        return ""
    lengths = [float(length) for length, _, _ in measured]
    load_slope, load_base = np.polyfit(lengths, [load for _, load, _ in measured], 1)
    compute_slope, compute_base = np.polyfit(lengths, [compute for _, _, compute in measured], 1)
    text = f"a token costs {load_slope * 1e3:.0f} us to load and {compute_slope * 1e3:.0f} us to compute"
    shortest = measured[0][0]
    if all(load < compute for _, load, compute in measured):
        return f"break-even prompt length: below {shortest} tokens; {text}"
    if compute_slope <= load_slope:
        return f"break-even prompt length: none, loading never pays here; {text}"
    return f"break-even prompt length: {(load_base - compute_base) / (compute_slope - load_slope):.0f} tokens; {text}"


def _ttft(length: int) -> str:
    return f"ttft_load_{length}"


def _with_unit(rates: tuple[float, float]) -> tuple[float, str, float]:
    return rates[0], "GB/s", rates[1]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The levels below the device beside the bounds of the machine.")
    add_arguments(parser)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    args = parser.parse_args()
    notes: list[str] = []
    rows = [
        *copy_rows(args.quick, args.only),
        *file_rows(args.folder, args.quick, args.only),
        *ttft_rows(args.quick, args.only, notes),
    ]
    progress("")
    for row in rows:
        target = FILE_TARGET if row.name.startswith("file") else COPY_TARGET
        if not row.name.startswith("ttft") and row.ratio < target:
            notes.append(f"{row.name}: {row.ratio:.2f} of the bound, target {target}")
    print_rows(rows, args.json, [note for note in notes if note])
    return 0


if __name__ == "__main__":
    sys.exit(main())
