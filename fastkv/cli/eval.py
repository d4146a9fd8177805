"""fastkv eval CONFIG: what each quantisation type costs in quality and saves in bytes, on real text."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from fastkv.cli.options import add_config_options, config_from, legal_configs
from fastkv.config import Config
from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind, check_legal, parse_quant_type
from fastkv.errors import ConfigError

if TYPE_CHECKING:
    from fastkv.engine.evaluation import EvaluationText, StorageQuality

_DEFAULT_TOKENS = 1024
_DEFAULT_CONTEXT = 512
_DEFAULT_CONTINUATION = 32


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        help="perplexity and agreement of every quantisation type, on real text",
        description="Read text through the paged cache once for each quantisation type that fits the model, and "
        "compare: cache bytes a token, perplexity, how often the most likely token is the one of the unquantised "
        "cache, and how long greedy continuations stay the same.",
    )
    add_config_options(parser)
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text; default: Python's reference manual")
    parser.add_argument(
        "--tokens", type=int, default=_DEFAULT_TOKENS, metavar="N", help=f"tokens to read at most ({_DEFAULT_TOKENS})"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=_DEFAULT_CONTEXT,
        metavar="N",
        help=f"tokens of a window; each starts with an empty cache ({_DEFAULT_CONTEXT})",
    )
    parser.add_argument(
        "--continue",
        type=int,
        dest="continuation",
        default=_DEFAULT_CONTINUATION,
        metavar="N",
        help=f"greedy tokens after each of four prompts ({_DEFAULT_CONTINUATION})",
    )
    parser.add_argument("--types", metavar="TYPE,…", help="only these, beside none (default: all that fit the model)")
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object a type")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import

    if args.kv_cache_quant_type is not None:
        raise ConfigError("eval compares quantisation types; name them with --types instead of --kv-cache-quant-type")
    for option, value, least in (
        ("--tokens", args.tokens, 2),
        ("--context", args.context, 2),
        ("--continue", args.continuation, 1),
    ):
        if value < least:
            raise ConfigError(f"{option} {value} must be at least {least}")
    config = config_from(args)
    configs = chosen_configs(config, args.types)
    prepare_runtime()
    with quiet_paddle_import():
        from fastkv.engine.corpus import load_text
        from fastkv.engine.evaluation import EvaluationText
        from fastkv.engine.model import load_model
        from fastkv.engine.model_files import RANDOM_PREFIX, load_tokenizer

    if (config.model.weights or "").startswith(RANDOM_PREFIX):
        raise ConfigError(
            f"eval reads text, and model.weights {config.model.weights} has no tokenizer; use a GGUF model"
        )
    text = load_text(args.text, "evaluate")
    model = load_model(config)
    token_ids = load_tokenizer(config).encode(text, allow_special=False)[: args.tokens]
    cut = EvaluationText.cut(token_ids, context_tokens=args.context, continuation_tokens=args.continuation)
    rows = _evaluate(model, configs, cut)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False))
    else:
        Console(highlight=False).print(quality_table(config, cut, rows))
    return 0


def chosen_configs(config: Config, types: str | None) -> dict[str, Config]:
    """Type's name -> config with it, "none" first.

    Args:
        config: the model's.
        types: names or aliases, separated by commas; None takes every type that fits the model.

    Raises:
        ConfigError: an unknown type, or one that does not fit the model.
    """
    fitting = {storage.name: typed for storage, typed in legal_configs(config)}
    if types is None:
        return fitting
    chosen = {"none": fitting["none"]}
    for word in types.split(","):
        storage = STORAGE_DTYPES[parse_quant_type(word.strip())]
        check_legal(storage, AttentionKind(config.model.attention))
        if storage.name not in fitting:
            config.with_cache(kv_cache_quant_type=storage.name, scale_granularity=None)  # raises, saying why
        chosen[storage.name] = fitting[storage.name]
    return chosen


def _evaluate(model: Any, configs: dict[str, Config], text: EvaluationText) -> list[StorageQuality]:
    from fastkv.engine.evaluation import evaluate

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:17}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("evaluating", total=text.work * len(configs))
        return evaluate(
            model,
            configs,
            text,
            on_progress=lambda name, tokens: progress.update(task, description=name, advance=tokens),
        )


def quality_table(config: Config, text: EvaluationText, rows: list[StorageQuality]) -> Table:
    """The rows for people."""
    reference = rows[0]
    table = Table(
        title=f"{config.model.name}: {reference.tokens:,} tokens predicted, {len(text.prompts)} prompts continued by "
        f"{reference.continuation_tokens}",
        title_justify="left",
    )
    table.add_column("type", no_wrap=True, min_width=max(len(row.kv_cache_quant_type) for row in rows))
    for heading in ("bytes a token", "perplexity", "change", "same top token", "same start"):
        table.add_column(heading, justify="right", min_width=len("perplexity") if heading == "perplexity" else None)
    for row in rows:
        table.add_row(
            row.kv_cache_quant_type,
            f"{row.bytes_per_token:,.0f}",
            f"{row.perplexity:.2f}" if row.perplexity < 1e6 else f"{row.perplexity:.2e}",
            f"{row.perplexity / reference.perplexity - 1:+.2%}" if row is not reference else "",
            f"{row.greedy_agreement:.1%}",
            f"{row.common_prefix_tokens:.1f}",
        )
    return table
