"""`fastkv replay`: what would caches of these sizes have found in a trace of real requests?

Owns the command's flags and what it shows: a progress bar on stderr, a table or JSON on stdout, a picture. The replay
itself is fastkv.scheduler.replay. Called by the `fastkv` command, which prints a FastKVError without a traceback.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fastkv.config import load_config
from fastkv.core.plan import MemoryBudget, plan_capacity
from fastkv.core.spec import CacheSpec
from fastkv.errors import ConfigError
from fastkv.scheduler.replay import POLICIES, UNBOUNDED, ReplayResult, Trace, parse_trace, replay

_CURVE_POINTS = 9  # sizes of a plot for which nobody named any: everything, a half, a quarter, ...
_ROW_KEYS = ("blocks", "policy", "hit_blocks", "hit_rate", "evictions", "manager_seconds")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `replay` to the command's subparsers (what ArgumentParser.add_subparsers returned)."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="hit rate of a trace for each cache size and policy",
        description="Replay a trace of requests through the prefix cache and report what caches of different sizes "
        "find. Requests run one after the other; docs/replay.md says how to make a trace from your own logs.",
    )
    parser.add_argument("trace", help="JSON lines with timestamp, input_length and hash_ids; - reads standard input")
    parser.add_argument("config", nargs="?", help="YAML config; its model says how many bytes a block has")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--blocks", action="append", metavar="N,N", help="cache sizes in blocks of the trace; 0 is unbounded (default)"
    )
    size.add_argument(
        "--memory", action="append", metavar="SIZE", help="cache sizes such as 4GiB; needs CONFIG; may be repeated"
    )
    parser.add_argument("--policy", action="append", metavar="P,P", help=f"of {', '.join(POLICIES)}; may be repeated")
    parser.add_argument("--block-tokens", type=int, metavar="N", help="tokens of a block, if the trace leaves it open")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead of a table")
    parser.add_argument("--plot", metavar="FILE.png", help="draw hit rate against cache size; needs fastkv[plot]")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out `fastkv replay`.

    Raises:
        ConfigError: a broken trace or config, impossible sizes, an unknown policy, no matplotlib for --plot.
    """
    policies = _policies(args.policy)
    figure_class = _import_figure() if args.plot else None
    trace = _read_trace(args.trace, args.block_tokens)
    spec = _trace_spec(args.config, trace) if args.config is not None else None
    sizes = _sizes(args, trace, spec)
    results = _replay_all(trace, [(size, policy) for policy in policies for size in sizes])
    if args.json:
        print(json.dumps([{key: getattr(result, key) for key in _ROW_KEYS} for result in results], indent=2))
    else:
        _print_table(trace, spec, results)
    _warn_of_rejected(results, trace)
    if figure_class is not None:
        _plot(figure_class, Path(args.plot), Path(args.trace).name, trace, spec, results)
    return 0


def _policies(given: Sequence[str] | None) -> list[str]:
    policies = list(dict.fromkeys(_split(given))) if given else [POLICIES[0]]
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policy {policy!r} is unknown; allowed: {', '.join(POLICIES)}")
    return policies


def _split(given: Sequence[str]) -> list[str]:
    return [part.strip() for text in given for part in text.split(",")]


def _read_trace(name: str, block_tokens: int | None) -> Trace:
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"--block-tokens {block_tokens} must be at least 1")
    if name == "-":
        return parse_trace(sys.stdin.buffer, "standard input", block_tokens)
    try:
        with open(name, "rb") as lines:
            return parse_trace(lines, name, block_tokens)
    except OSError as error:
        raise ConfigError(f"trace {name} cannot be read: {error.strerror}; give a JSON lines file") from error


def _trace_spec(config: str, trace: Trace) -> CacheSpec:
    """The config's caches with blocks as long as the trace's: a block of a trace cannot be split."""
    return load_config(config, {"cache.block_size": trace.block_tokens}).cache_spec()


def _sizes(args: argparse.Namespace, trace: Trace, spec: CacheSpec | None) -> list[int]:
    """Cache sizes in blocks, as asked; with --plot and none asked, a curve, and always the unbounded limit."""
    if args.memory:
        if spec is None:
            raise ConfigError("--memory needs a CONFIG to know the bytes of a block; give one, or use --blocks")
        sizes = [_blocks_of(text, spec) for text in _split(args.memory)]
    elif args.blocks:
        sizes = [_block_count(text) for text in _split(args.blocks)]
    else:
        sizes = [_configured_blocks(args.config, trace, spec)] if spec is not None else []
        if args.plot:
            sizes += [max(1, trace.num_unique >> halvings) for halvings in range(_CURVE_POINTS)]
        sizes = sorted(sizes) or [UNBOUNDED]
    if args.plot:
        sizes.append(UNBOUNDED)
    return list(dict.fromkeys(sizes))


def _block_count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--blocks {text!r} is no number of blocks; write whole numbers such as 1000,4000, or 0")
    return int(text)


def _blocks_of(text: str, spec: CacheSpec) -> int:
    return plan_capacity(spec, device_budget_bytes=MemoryBudget.parse(text).resolve(None)).num_device_blocks


def _configured_blocks(config: str, trace: Trace, spec: CacheSpec) -> int:
    """What the config itself gives the device, in blocks of the trace."""
    plan = load_config(config).capacity_plan()
    blocks = plan.device_bytes // spec.pool_block_bytes
    if blocks < 1:
        raise ConfigError(
            f"{config} gives the device {plan.device_bytes} bytes of cache, below one block of the trace "
            f"({trace.block_tokens} tokens, {spec.pool_block_bytes} bytes); give --memory or --blocks"
        )
    return blocks


def _replay_all(trace: Trace, runs: list[tuple[int, str]]) -> list[ReplayResult]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=len(trace.requests) * len(runs))

        def on_requests(count: int) -> None:
            progress.update(task, advance=count)

        return [_replay_one(trace, size, policy, progress, task, on_requests) for size, policy in runs]


def _replay_one(
    trace: Trace, size: int, policy: str, progress: Progress, task: Any, on_requests: Callable[[int], None]
) -> ReplayResult:
    progress.update(task, description=f"{policy}, {_size_name(size)}")
    return replay(trace, size, policy, on_requests)


def _size_name(blocks: int) -> str:
    return "unbounded" if blocks == UNBOUNDED else f"{blocks:,} blocks"


def _gib(spec: CacheSpec, blocks: int) -> float:
    return blocks * spec.pool_block_bytes / 2**30


def _print_table(trace: Trace, spec: CacheSpec | None, results: Sequence[ReplayResult]) -> None:
    """One line a result, at most 80 columns wide; columns that say nothing are left out."""
    columns: dict[str, Callable[[ReplayResult], str]] = {
        "cache blocks": lambda r: "unbounded" if r.blocks == UNBOUNDED else f"{r.blocks:,}",
        "GiB": lambda r: "" if spec is None or r.blocks == UNBOUNDED else f"{_gib(spec, r.blocks):.4g}",
        "policy": lambda r: r.policy,
        "hit blocks": lambda r: f"{r.hit_blocks:,}",
        "hit rate": lambda r: f"{r.hit_rate:.2%}",
        "tokens saved": lambda r: _short(r.saved_tokens),
        "blocks evicted": lambda r: f"{r.evictions:,}",
        "requests rejected": lambda r: f"{r.rejected_requests:,}",
        "manager seconds": lambda r: f"{r.manager_seconds:.3f}",
    }
    if spec is None:
        del columns["GiB"]
    if not any(result.rejected_requests for result in results):
        del columns["requests rejected"]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in columns:
        table.add_column(heading.replace(" ", "\n"), justify="left" if heading == "policy" else "right", no_wrap=True)
    for result in results:
        table.add_row(*(cell(result) for cell in columns.values()))
    console = Console()
    console.print(
        f"{len(trace.requests):,} requests, {trace.num_blocks:,} blocks of {trace.block_tokens} tokens, "
        f"{trace.num_unique:,} different",
        highlight=False,
    )
    console.print(table)


def _short(count: int) -> str:
    """Four digits are enough to compare token counts by."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return str(count)


def _warn_of_rejected(results: Sequence[ReplayResult], trace: Trace) -> None:
    smallest = min((r for r in results if r.rejected_requests), key=lambda r: r.blocks, default=None)
    if smallest is not None:
        longest = max(len(request.contents) for request in trace.requests)
        print(
            f"warning: a cache of {smallest.blocks:,} blocks is too small for {smallest.rejected_requests:,} requests "
            f"(the longest needs {longest:,}); they count as not found",
            file=sys.stderr,
        )


def _import_figure() -> Any:
    """matplotlib's Figure, asked for before the work so that its absence costs nobody a wait."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which cannot be imported ({error}); run `pip install fastkv[plot]`"
        ) from error
    return Figure


def _plot(
    figure_class: Any, path: Path, name: str, trace: Trace, spec: CacheSpec | None, results: Sequence[ReplayResult]
) -> None:
    """Hit rate against cache size, one curve a policy, the unbounded limit as a line."""
    figure = figure_class(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(result.policy for result in results):
        curve = sorted((r.blocks, 100 * r.hit_rate) for r in results if r.policy == policy and r.blocks != UNBOUNDED)
        axes.plot([x for x, _ in curve], [y for _, y in curve], marker="o", label=policy)
    limit = 100 * next(result.hit_rate for result in results if result.blocks == UNBOUNDED)
    axes.axhline(limit, color="0.4", linestyle="--", label=f"unbounded: {limit:.2f} %")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda blocks, _: f"{blocks:,.0f}")
    axes.set_ylim(0, max(limit * 1.1, 1))
    axes.set_xlabel(f"cache size (blocks of {trace.block_tokens} tokens)")
    axes.set_ylabel("hit rate (% of blocks)")
    axes.set_title(f"{name}: {len(trace.requests):,} requests, {trace.num_blocks:,} blocks")
    if spec is not None:
        to_gib = spec.pool_block_bytes / 2**30
        upper = axes.secondary_xaxis("top", functions=(lambda x: x * to_gib, lambda x: x / to_gib))
        upper.set_xlabel("GiB")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}; name a .png file in an existing folder") from None
