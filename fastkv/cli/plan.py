"""fastkv plan CONFIG: what the caches will look like, before anything is allocated. Needs no paddle."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from fastkv.cli.options import add_config_options, config_from, format_bytes, legal_configs
from fastkv.config import Config
from fastkv.core.plan import BudgetBelowOneBlockError, CapacityPlan
from fastkv.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="print dtype, shape and bytes of every cache, and how much fits",
        description="Print dtype and shape of every role, bytes per token and block, blocks, tokens, and how many "
        "full-length requests fit. Nothing is allocated.",
    )
    add_config_options(parser)
    parser.add_argument("--compare", action="store_true", help="all legal quantisation types side by side")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.compare and args.kv_cache_quant_type is not None:
        raise ConfigError("--compare shows every quantisation type; leave --kv-cache-quant-type out")
    config = config_from(args)
    console = Console(highlight=False)
    if args.compare:
        rows = compare(config)
        print(json.dumps(rows, indent=2)) if args.json else console.print(_comparison_table(config, rows))
        return 0
    plan = config.capacity_plan()
    if args.json:
        print(json.dumps(describe(config, plan), indent=2))
        return 0
    console.print(_roles_table(config, plan))
    console.print(_capacity_table(config, plan))
    return 0


def describe(config: Config, plan: CapacityPlan) -> dict[str, Any]:
    """The plan as plain values."""
    spec = plan.spec
    return {
        "model": config.model.name,
        "cache_manager": config.cache.manager,
        "attention": config.model.attention,
        "model_dtype": spec.model_dtype,
        "kv_cache_quant_type": spec.storage.name,
        "storage_dtype": spec.cache_dtype,
        "tensor_parallel_size": spec.tp_size,
        "block_size": spec.block_size,
        "groups": [
            {
                "name": group.name,
                "layers": [group.layers.start, group.layers.stop],
                "kv_heads_per_rank": group.kv_heads,
                "num_blocks": group.num_blocks(plan.num_device_blocks),
                "block_bytes": group.block_bytes,
                "device_bytes": plan.group_bytes(group.name),
                "roles": [
                    {
                        "role": role.role.value,
                        "dtype": role.dtype,
                        "shape": list(role.shape(group.num_blocks(plan.num_device_blocks))),
                        "block_bytes": role.block_bytes,
                    }
                    for role in group.roles
                ],
            }
            for group in spec.groups
        ],
        "bytes_per_token": spec.block_bytes / spec.block_size,
        "block_bytes": spec.block_bytes,
        "record_stride_bytes": spec.record_stride_bytes,
        "num_device_blocks": plan.num_device_blocks,
        "device_tokens": plan.device_tokens,
        "device_bytes": plan.device_bytes,
        "device_budget_bytes": plan.device_budget_bytes,
        "num_host_blocks": plan.num_host_blocks,
        "host_bytes": plan.host_bytes,
        "host_budget_bytes": plan.host_budget_bytes,
        "max_context": config.model.max_context,
        "full_length_requests": plan.full_length_requests(config.model.max_context),
    }


def compare(config: Config) -> list[dict[str, Any]]:
    """One row for each quantisation type that the config's model can be stored with; 0 blocks where none fits."""
    rows = []
    for storage, typed in legal_configs(config):
        spec = typed.cache_spec()
        plan = _plan_or_none(typed)
        rows.append(
            {
                "kv_cache_quant_type": storage.name,
                "storage_dtype": spec.cache_dtype,
                "bytes_per_token": spec.block_bytes / spec.block_size,
                "block_bytes": spec.block_bytes,
                "num_device_blocks": plan.num_device_blocks if plan else 0,
                "device_tokens": plan.device_tokens if plan else 0,
                "full_length_requests": plan.full_length_requests(config.model.max_context) if plan else 0,
            }
        )
    return rows


def _plan_or_none(config: Config) -> CapacityPlan | None:
    """The capacity plan, or None if the budget does not hold one block of this type."""
    try:
        return config.capacity_plan()
    except BudgetBelowOneBlockError:
        return None


def _roles_table(config: Config, plan: CapacityPlan) -> Table:
    spec = plan.spec
    table = Table(
        title=f"{config.model.name}: {config.model.attention} attention, {spec.model_dtype} model, "
        f"quantisation {spec.storage.name}, {config.cache.manager}, rank 1 of {spec.tp_size}",
        title_justify="left",
    )
    for heading in ("group", "layers", "role", "dtype", "shape on the device"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes a block and layer", justify="right")
    for group in spec.groups:
        for role in group.roles:
            table.add_row(
                group.name,
                f"{group.layers.start}-{group.layers.stop - 1}",
                role.role.value,
                role.dtype,
                str(list(role.shape(group.num_blocks(plan.num_device_blocks)))),
                f"{role.block_bytes:,}",
            )
    return table


def _capacity_table(config: Config, plan: CapacityPlan) -> Table:
    spec, fits = plan.spec, plan.full_length_requests(config.model.max_context)
    table = Table(show_header=False)
    table.add_row("bytes a token", f"{spec.block_bytes / spec.block_size:,.0f}")
    table.add_row(f"bytes a block ({spec.block_size} tokens)", f"{spec.block_bytes:,}")
    table.add_row("device blocks", f"{plan.num_device_blocks:,}")
    table.add_row("device tokens", f"{plan.device_tokens:,}")
    for group in spec.groups:
        table.add_row(f"device memory, {group.name}", format_bytes(plan.group_bytes(group.name)))
    if plan.device_budget_bytes is not None:
        table.add_row("device budget", format_bytes(plan.device_budget_bytes))
    table.add_row("host blocks", f"{plan.num_host_blocks:,} ({format_bytes(plan.host_bytes)})")
    table.add_row(f"requests of {config.model.max_context:,} tokens that fit", f"{fits:,}")
    return table


def _comparison_table(config: Config, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{config.model.name}: every legal quantisation type", title_justify="left")
    # Types keep their width: a terminal of 80 columns would cut float8_e4m3fn and float8_e4m3fn_zp to one word.
    table.add_column("type", no_wrap=True, min_width=max(len(row["kv_cache_quant_type"]) for row in rows))
    table.add_column("stored as")
    for heading in ("bytes a token", "blocks", "tokens", f"requests of {config.model.max_context:,}"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["kv_cache_quant_type"],
            row["storage_dtype"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['num_device_blocks']:,}",
            f"{row['device_tokens']:,}",
            f"{row['full_length_requests']:,}",
        )
    return table
