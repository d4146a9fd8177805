"""What every benchmark of this repo shares: the row it prints, the bound beside it, and how both are timed.

A row is a figure with its unit and the bound that the machine set in the same run, measured in turns with the figure so
that both see the same clock speed, cache state and neighbours. ratio 1.0 means as good as the bound; higher is better,
whether the figure is a cost or a rate.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the checkout's fastkv, installed or not
COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-g0")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured, on which sizes.
        value: median of several measurements.
        unit: of value and bound.
        bound: the same, of the bound.
        ratio: 1.0 = the bound, higher is better.
    """

    name: str
    value: float
    unit: str
    bound: float
    ratio: float

    @classmethod
    def cost(cls, name: str, value: float, unit: str, bound: float) -> Row:
        """A row of which less is better (time, bytes)."""
        return cls(name, value, unit, bound, bound / value)

    @classmethod
    def rate(cls, name: str, value: float, unit: str, bound: float) -> Row:
        """A row of which more is better (bytes a second)."""
        return cls(name, value, unit, bound, value / bound)


def interleave(
    samplers: Sequence[Callable[[], Sequence[float]]],
    budget_s: float,
    min_samples: int = 5,
    max_samples: int = 1000,
    warmup_rounds: int = 1,
) -> list[list[float]]:
    """Call the samplers in turns and take medians.

    Args:
        samplers: each measures once and returns one or more figures, always the same ones.
        budget_s: stop after this long, but not before min_samples each.
        warmup_rounds: rounds that do not count, because they pay for cold pages or an unsettled state.

    Returns:
        For each sampler in order, the medians of its figures.
    """
    for _ in range(warmup_rounds):
        for sampler in samplers:
            sampler()
    samples: list[list[Sequence[float]]] = [[] for _ in samplers]
    end = perf_counter() + budget_s
    while len(samples[0]) < min_samples or (perf_counter() < end and len(samples[0]) < max_samples):
        turn = len(samples[0]) % len(samplers)  # nobody always runs after the same neighbour
        for place in (*range(turn, len(samplers)), *range(turn)):
            samples[place].append(samplers[place]())
    return [[median(figure) for figure in zip(*each, strict=True)] for each in samples]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples; under 40 seconds")
    parser.add_argument("--json", action="store_true", help="print a list of rows {name, value, unit, bound, ratio}")
    parser.add_argument("--only", metavar="TEXT", default="", help="only rows whose name contains TEXT")


def print_rows(rows: Sequence[Row], as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print rows to stdout, as JSON or as a table; notes go below the table, or to stderr beside JSON."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        width = max((len(row.name) for row in rows), default=4)
        print(f"{'name':<{width}}  {'value':>11}  {'bound':>11}  {'unit':<8}  ratio")
        for row in rows:
            figures = f"{_figure(row.value):>11}  {_figure(row.bound):>11}"
            print(f"{row.name:<{width}}  {figures}  {row.unit:<8}  {row.ratio:5.2f}")
    for note in notes:
        print(note, file=sys.stderr if as_json else sys.stdout)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def progress(text: str) -> None:
    """Say on stderr what is being measured; silent when nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def load_floor(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile a C++ floor on first use, and load it.

    Args:
        source: a .cc file; the headers of its folder count as part of it.
        flags: added to -O3 -std=c++17.

    Raises:
        RuntimeError: no C++ compiler, or it refuses the source.
    """
    headers = sorted(source.parent.glob("*.h"))
    command = [*COMPILE_FLAGS, *flags]
    content = b"".join(path.read_bytes() for path in (source, *headers)) + repr(command).encode()
    library = BUILD / f"{source.stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{source.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            _compile(source, command, library)
    return ctypes.CDLL(str(library))


def _compile(source: Path, flags: Sequence[str], library: Path) -> None:
    compiler = next((name for name in (os.environ.get("CXX"), "g++", "c++") if name and shutil.which(name)), None)
    if compiler is None:
        raise RuntimeError(f"the floor {source.name} needs a C++ compiler and none was found: install g++ or set CXX")
    fresh = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run(
        [compiler, *flags, str(source), "-o", str(fresh)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{compiler} cannot compile {source}:\n{done.stderr}")
    fresh.replace(library)
