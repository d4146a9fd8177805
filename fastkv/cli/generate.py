"""fastkv generate CONFIG: text from a real model over fastkv's caches."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fastkv.cli.options import add_config_options, config_from, format_bytes
from fastkv.config import Config
from fastkv.core.messages import SamplingParams
from fastkv.errors import RequestError

if TYPE_CHECKING:
    from fastkv.engine.llm import LLM
    from fastkv.engine.report import Generation, Report


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate", help="generate text", description="Complete one prompt, or a file of prompts in one batch."
    )
    add_config_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; its text streams to the terminal")
    source.add_argument("--prompts", metavar="FILE.jsonl", help='one JSON object a line: {"prompt": "..."}')
    parser.add_argument("--chat", action="store_true", help="wrap each prompt as a user's turn of a conversation")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens to generate at most (64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling, with a temperature (0)")
    parser.add_argument("--no-prefix-caching", action="store_true", help="override cache.enable_prefix_caching")
    parser.add_argument("--worker", choices=("inline", "process"), default="inline", help="where the model runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object: outputs and report")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    config = config_from(args)
    if args.no_prefix_caching:
        config = config.with_cache(enable_prefix_caching=False)
    prompts = [args.prompt] if args.prompt is not None else read_prompts(Path(args.prompts))
    sampling = SamplingParams(args.temperature, args.seed)
    llm = _start(config, args.worker, quiet=args.json)
    with llm:
        generation = _generate(llm, prompts, args, sampling)
    if args.json:
        outputs = [{"text": output.text, "token_ids": output.token_ids} for output in generation.outputs]
        print(json.dumps({"outputs": outputs, "report": generation.report.to_dict()}))
    else:
        _print_outputs(args, generation)
        Console(stderr=True, highlight=False).print(report_table(generation.report))
    return 0


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSON-lines file.

    Raises:
        RequestError: missing file, or a line that is no object with a text under "prompt"; its number is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold what splitlines takes for ends
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts file {path} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise RequestError(f'{path}:{number}: expected an object like {{"prompt": "text"}}, got {line[:80]!r}')
        prompts.append(prompt)
    if not prompts:
        raise RequestError(f"prompts file {path} holds no prompts")
    return prompts


def _start(config: Config, worker: str, quiet: bool) -> LLM:
    from fastkv.engine.llm import LLM

    console = Console(stderr=True, quiet=quiet)
    with console.status(Text(f"loading {config.model.name} …")):
        return LLM(config, worker)


def _generate(llm: LLM, prompts: list[str], args: argparse.Namespace, sampling: SamplingParams) -> Generation:
    options: dict[str, Any] = {"max_tokens": args.max_tokens, "sampling": sampling, "chat": args.chat}
    if args.json:
        return llm.generate(prompts, **options)
    if len(prompts) == 1:
        pending = [] if args.chat else [prompts[0]]  # shown once the request is admitted

        def show(_: int, text: str) -> None:
            sys.stdout.write("".join(pending) + text)
            sys.stdout.flush()
            pending.clear()

        generation = llm.generate(prompts, on_text=show, **options)
        print()
        return generation
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(prompts), tokens=0)
        return llm.generate(
            prompts,
            on_progress=lambda finished, tokens: progress.update(task, completed=finished, tokens=tokens),
            **options,
        )


def _print_outputs(args: argparse.Namespace, generation: Generation) -> None:
    if args.prompt is not None or len(generation.outputs) == 1:
        return  # streamed already
    for number, output in enumerate(generation.outputs, 1):
        print(f"--- {number}: {str(output.prompt)[:70]!r}")
        print(output.text)


def report_table(report: Report) -> Table:
    """The short report at the end, for people."""
    table = Table(show_header=False)
    table.add_row("prefill", f"{report.prefill_tokens_per_s:,.0f} tokens/s ({report.prefill_tokens:,} tokens)")
    table.add_row("decode", f"{report.decode_tokens_per_s:,.0f} tokens/s ({report.output_tokens:,} tokens)")
    table.add_row("prefix hits", f"{report.prefix_hit_tokens:,} of {report.prompt_tokens:,} prompt tokens")
    table.add_row("blocks", f"{report.peak_blocks:,} of {report.num_blocks:,} used, {report.block_size} tokens each")
    quantised = "" if report.kv_cache_quant_type == "none" else f" ({report.kv_cache_quant_type})"
    table.add_row("cache", f"{report.cache_manager}, stored as {report.storage_dtype}{quantised}")
    device_bytes = report.device_cache_bytes + report.mtp_cache_bytes
    table.add_row("cache memory", f"device {format_bytes(device_bytes)}, host {format_bytes(report.host_cache_bytes)}")
    if moved := describe_moved(report):
        table.add_row("blocks moved", moved)
    if report.moved.failed_transfers:
        table.add_row("last failure", Text(report.transfer_error))  # not markup, whatever brackets it has
    if report.storage_error:
        table.add_row("storage", Text(report.storage_error))
    return table


def describe_moved(report: Report) -> str:
    """What moved between the levels, in words; "" when nothing did."""
    counts = {name.replace("_", " "): count for name, count in asdict(report.moved).items() if count}
    return ", ".join(f"{count:,} {name.removesuffix(' blocks')}" for name, count in counts.items())
