"""Options and printing that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from fastkv.config import Config, load_config, parse_scalar
from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind, StorageDtype
from fastkv.errors import ConfigError


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """CONFIG and the flags that override its cache section."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, for example configs/smollm2.yaml")
    parser.add_argument(
        "--kv-cache-quant-type", metavar="TYPE", help="override cache.kv_cache_quant_type (none, int8, …)"
    )
    parser.add_argument("--cache-manager", metavar="v0|v1", help="override cache.manager")
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="override cache.device_memory, for example 16GiB or 0.9"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override any key of the config, for example --set scheduler.max_batch_size=4; may be repeated",
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="override cache.block_size")


def config_from(args: argparse.Namespace) -> Config:
    """The config that the options name, with their overrides.

    Raises:
        ConfigError: as `load_config`.
    """
    overrides: dict[str, Any] = {}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals or key.count(".") != 1:
            raise ConfigError(f"--set {text}: write SECTION.KEY=VALUE, for example scheduler.max_batch_size=4")
        overrides[key] = parse_scalar(value)
    if args.kv_cache_quant_type is not None:
        overrides["cache.kv_cache_quant_type"] = args.kv_cache_quant_type
    if args.cache_manager is not None:
        overrides["cache.manager"] = args.cache_manager
    if args.cache_manager == "v0":  # v0 has no host level: asking for it on the command line means going without
        overrides["cache.host_memory"] = overrides["cache.num_host_blocks"] = None
    if args.device_memory is not None:
        overrides["cache.device_memory"] = parse_scalar(args.device_memory)
        overrides["cache.num_device_blocks"] = None
    if args.block_size is not None:
        overrides["cache.block_size"] = args.block_size
    return load_config(args.config, overrides)


def legal_configs(config: Config) -> list[tuple[StorageDtype, Config]]:
    """Each quantisation type that the config's model can be stored with, and the config with that type.

    A scale_granularity of the config that a type does not know is left out for that type.
    """
    attention, found = AttentionKind(config.model.attention), []
    for storage in STORAGE_DTYPES.values():
        if not storage.is_legal_with(attention):
            continue
        asked = config.cache.scale_granularity
        known = asked in {granularity.value for granularity in storage.granularities[attention]}
        changes = {"kv_cache_quant_type": storage.name, "scale_granularity": asked if known else None}
        try:
            found.append((storage, config.with_cache(**changes)))
        except ConfigError:
            continue  # the config itself was valid: it is this type that does not fit, as int4 and an odd head_dim
    return found


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
