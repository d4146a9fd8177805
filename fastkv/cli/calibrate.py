"""fastkv calibrate CONFIG: run real text through the model and write the scales file its config names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fastkv.cli.options import add_config_options, config_from
from fastkv.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "calibrate",
        help="measure the static scales that int8, fp8 and int4 caches need",
        description="Run text through the model and write the range of every channel of keys and values. One file "
        "serves every static quantisation type, granularity and tensor-parallel size.",
    )
    add_config_options(parser)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text; default: Python's reference manual")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens to run at most (4096)")
    parser.add_argument(
        "--percentile",
        type=float,
        default=100.0,
        metavar="P",
        help="values inside the range, in percent (100: extremes)",
    )
    parser.add_argument("--output", metavar="FILE", help="default: the config's cache.scales_file")
    parser.add_argument("--json", action="store_true", help="print one JSON object about the file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import

    config = config_from(args)
    if args.tokens < 2:
        raise ConfigError(f"--tokens {args.tokens}: calibration needs at least 2 tokens")
    if args.output is None and config.cache.scales_file is None:
        raise ConfigError("nowhere to write: set cache.scales_file in the config, or give --output FILE")
    path = Path(args.output) if args.output else config.resolve_path(config.cache.scales_file or "")
    prepare_runtime()
    with quiet_paddle_import():
        from fastkv.core.scales import CalibrationRanges
        from fastkv.engine.calibration import RangeCollector, collect_ranges
        from fastkv.engine.corpus import load_text
        from fastkv.engine.model import load_model
        from fastkv.engine.model_files import load_tokenizer
        from fastkv.worker.static_scales import check_writable, write_scales_file

    check_writable(path)
    collector = RangeCollector(args.percentile)
    text = load_text(args.text, "calibrate")
    token_ids = load_tokenizer(config).encode(text, allow_special=False)[: args.tokens]
    model = load_model(config)
    with Progress(console=Console(stderr=True, quiet=args.json), transient=True) as progress:
        task = progress.add_task("calibrating", total=len(token_ids))
        num_tokens = collect_ranges(
            model, token_ids, collector, on_progress=lambda done: progress.update(task, completed=done)
        )
    ranges = CalibrationRanges(config.model.name, model.revision, collector.method, num_tokens, collector.ranges())
    write_scales_file(path, ranges)
    summary = {"file": str(path), "method": collector.method, "tokens": num_tokens, "layers": len(ranges.layers)}
    if args.json:
        print(json.dumps(summary))
    else:
        print(f"wrote {path}: {len(ranges.layers)} layers, {collector.method} over {num_tokens} tokens")
    return 0
