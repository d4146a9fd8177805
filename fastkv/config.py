"""YAML files and dicts to frozen, validated configuration. The only reader of configs/ and of FASTKV_* variables.

A config is read strictly: an unknown key, a wrong type or an impossible combination is a ConfigError that names the key
path, the value and what is allowed. Later sources win: file, then environment, then the caller's overrides (a command
line's flags). Every key has an environment twin, FASTKV_<SECTION>__<KEY>, for example FASTKV_CACHE__BLOCK_SIZE=32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from fastkv.core.dtype import AttentionKind, ScaleGranularity, check_model_dtype, parse_quant_type
from fastkv.core.geometry import AttentionGeometry
from fastkv.core.plan import MAX_BLOCKS, CapacityPlan, MemoryBudget, plan_capacity
from fastkv.core.spec import CacheSpec
from fastkv.errors import ConfigError
from fastkv.strict_yaml import StrictLoader, at, explain, field_names, override, place_of, unknown_key

ENV_PREFIX = "FASTKV_"

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
ThreadCount = Annotated[int, msgspec.Meta(ge=1, le=1024)]
CopyThreadCount = Annotated[int, msgspec.Meta(ge=1, le=256)]  # kMaxThreads of custom_ops/cpu/records.cc
BlockCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
HostBlockCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]  # a year; what waits takes no infinity
Size = int | float | str


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One mapping of the YAML file."""


class ModelConfig(_Section, frozen=True):
    """The model: where its weights are, and the geometry that its caches follow (of the whole model, before TP)."""

    name: str
    attention: Literal["mha", "gqa", "mla", "dsa"]
    num_layers: Positive
    num_attention_heads: Positive
    max_context: Positive
    dtype: str = "bfloat16"
    weights: str | None = None  # a GGUF file, or package:NAME for one inside an installed Python package
    num_kv_heads: NonNegative = 0
    head_dim: NonNegative = 0
    v_head_dim: NonNegative = 0
    kv_lora_rank: NonNegative = 0
    qk_rope_head_dim: NonNegative = 0
    index_head_dim: NonNegative = 0


class SpeculationConfig(_Section, frozen=True):
    """Layers that draft tokens and keep caches of their own. Dims left at 0 are the main model's.

    How many tokens are drafted is no matter of the caches: whoever speculates asks for room (reserve_drafts).
    """

    method: Literal["mtp"] = "mtp"
    num_layers: Positive = 1
    block_expand_ratio: Positive = 1
    attention: Literal["mha", "gqa", "mla", "dsa"] | None = None
    num_kv_heads: NonNegative = 0
    head_dim: NonNegative = 0
    v_head_dim: NonNegative = 0


class ParallelConfig(_Section, frozen=True):
    """How the model is split over devices."""

    tensor_parallel_size: Positive = 1


class DeviceConfig(_Section, frozen=True):
    """The device that holds the caches."""

    type: Literal["cpu", "gpu"] = "cpu"
    memory: Size | None = None  # what the device has; only needed when device_memory is a fraction


class CacheConfig(_Section, frozen=True):
    """The caches: who owns them, how they are stored, how much memory they get."""

    manager: Literal["v0", "v1"] = "v1"
    kv_cache_quant_type: str | None = None
    scale_granularity: Literal["channel", "head", "tensor"] | None = None
    scales_file: str | None = None
    block_size: Positive = 64
    device_memory: Size | None = None
    num_device_blocks: BlockCount | None = None
    host_memory: Size | None = None
    num_host_blocks: HostBlockCount | None = None
    enable_prefix_caching: bool = True
    eviction_policy: Literal["lru", "2q"] = "lru"  # see fastkv.scheduler.policy; `fastkv replay` compares them
    # when a block is copied to the host: once it is computed, once it was found often enough, or when it must leave
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    write_through_threshold: Positive = 2  # of write_through_selective: copied from this many matches on
    copy_threads: CopyThreadCount = 2  # that move blocks between device and host
    transfer_timeout_s: Seconds = 30.0  # after that a copy counts as failed and its step is computed again


class StorageConfig(_Section, frozen=True):
    """The level below the host cache: records of blocks that outlive the process."""

    path: str
    max_bytes: Size
    backend: Literal["file"] = "file"
    durability: Literal["process", "disk"] = "process"  # what a stored record survives; see fastkv.storage.base
    segment_bytes: Size = "256MiB"
    io_threads: ThreadCount = 2
    lookup_timeout_s: Seconds = 0.05  # how long the scheduler may ask what is there
    get_timeout_s: Seconds = 2.0  # how long a waiting request waits for its blocks
    put_timeout_s: Seconds = 30.0
    max_queued_records: Positive = 256  # that wait to be written; more are dropped
    failure_limit: Positive = 3  # failures in a row after which the backend is left alone ...
    cooldown_s: Seconds = 5.0  # ... for this long


class KVEventsConfig(_Section, frozen=True):
    """Tell others which blocks can be found, for cache-aware routing; see fastkv.scheduler.events."""

    endpoint: str | None = None  # where a ZeroMQ PUB socket binds; None: only for callbacks in this process
    replay_endpoint: str | None = None  # where batches can be asked for again
    topic: str = ""
    shape: Literal["map", "array"] = "map"
    int_hashes: bool = False


class SchedulerConfig(_Section, frozen=True):
    """Continuous batching."""

    max_batch_size: Positive = 16
    max_batch_tokens: Positive = 512


class Config(_Section, frozen=True):
    """A whole configuration. Build one with `load_config` or `parse_config`, which validate it."""

    model: ModelConfig
    cache: CacheConfig
    speculation: SpeculationConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    storage: StorageConfig | None = None
    kv_events: KVEventsConfig | None = None
    base_dir: str = "."  # relative file names in the config start here

    def cache_spec(self) -> CacheSpec:
        """The description of every cache byte that follows from this config."""
        granularity = self.cache.scale_granularity
        with at("model / cache"):
            return CacheSpec.build(
                _main_geometry(self.model),
                model_dtype=self.model.dtype,
                kv_cache_quant_type=self.cache.kv_cache_quant_type,
                block_size=self.cache.block_size,
                mtp=_mtp_geometry(self.model, self.speculation),
                mtp_expand_ratio=self.speculation.block_expand_ratio if self.speculation else 1,
                tp_size=self.parallel.tensor_parallel_size,
                scale_granularity=ScaleGranularity(granularity) if granularity else None,
            )

    def capacity_plan(self, device_capacity_bytes: int | None = None) -> CapacityPlan:
        """Blocks for main, MTP and host.

        Args:
            device_capacity_bytes: what the device has, if the caller measured it; device.memory wins.
        """
        if self.device.memory is not None:
            device_capacity_bytes = MemoryBudget.parse(self.device.memory).resolve(device_capacity_bytes)
        cache = self.cache
        device = None if cache.device_memory is None else MemoryBudget.parse(cache.device_memory)
        host = None if cache.host_memory is None else MemoryBudget.parse(cache.host_memory)
        return plan_capacity(
            self.cache_spec(),
            device_budget_bytes=device.resolve(device_capacity_bytes) if device else None,
            num_device_blocks=cache.num_device_blocks,
            host_budget_bytes=host.resolve(None) if host else None,
            num_host_blocks=cache.num_host_blocks,
        )

    def with_cache(self, **changes: Any) -> Config:
        """This config with some keys of its cache section changed, validated again.

        Raises:
            ConfigError: as `parse_config`.
        """
        data = msgspec.to_builtins(self)
        data.pop("base_dir")
        data["cache"].update(changes)
        return parse_config(data, self.base_dir)

    def resolve_path(self, name: str) -> Path:
        """A file named in the config, relative to the config's own folder."""
        return Path(self.base_dir, name)


def load_config(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML config, apply FASTKV_* variables and overrides, validate.

    Args:
        path: the file.
        overrides: dotted key path -> value, for example {"cache.block_size": 32}; they win over file and environment.

    Raises:
        ConfigError: missing or broken file, or anything `parse_config` refuses.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; see configs/ for examples") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is no valid YAML: {place_of(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"config file {path} must hold a mapping with the sections {field_names(Config)}, got {data!r}"
        )
    with at(str(path)):
        merged = override(override(data, _environment(os.environ)), overrides or {})
        return parse_config(merged, base_dir=path.parent)


def parse_config(data: Mapping[str, Any], base_dir: str | os.PathLike[str] = ".") -> Config:
    """Validate a config given as nested dicts. The environment is not read.

    Raises:
        ConfigError: naming the key path, the value and what is allowed.
    """
    if "base_dir" in data:
        raise ConfigError(f"config: {unknown_key('base_dir', Config)}")
    try:
        config = msgspec.convert({**data, "base_dir": str(base_dir)}, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), data, Config)) from None
    _check(config)
    return config


def _check(config: Config) -> None:
    """Everything that one key alone cannot show."""
    model, cache = config.model, config.cache
    with at("model.dtype"):
        check_model_dtype(model.dtype)
    with at("cache.kv_cache_quant_type"):
        parse_quant_type(cache.kv_cache_quant_type)
    if model.attention in ("mha", "gqa"):
        if model.num_kv_heads and model.num_attention_heads % model.num_kv_heads:
            raise ConfigError(
                f"model.num_attention_heads {model.num_attention_heads} must be a multiple of model.num_kv_heads "
                f"{model.num_kv_heads}"
            )
        if model.attention == "mha" and model.num_attention_heads != model.num_kv_heads:
            raise ConfigError(
                f"model.attention mha needs as many KV heads as heads, got {model.num_kv_heads} and "
                f"{model.num_attention_heads}; use gqa"
            )
    if model.num_attention_heads % config.parallel.tensor_parallel_size:
        raise ConfigError(
            f"parallel.tensor_parallel_size {config.parallel.tensor_parallel_size} must divide "
            f"model.num_attention_heads {model.num_attention_heads}"
        )
    _check_memory(config)
    if cache.manager == "v0" and _has_host(cache):
        raise ConfigError(
            "cache.manager v0 owns device caches only; remove cache.host_memory and cache.num_host_blocks or use v1"
        )
    if config.storage is not None:
        _check_storage(config.storage, cache)
    if config.kv_events is not None:
        _check_kv_events(config.kv_events, cache)
    if config.scheduler.max_batch_tokens < config.scheduler.max_batch_size:
        raise ConfigError(
            f"scheduler.max_batch_tokens {config.scheduler.max_batch_tokens} is below scheduler.max_batch_size "
            f"{config.scheduler.max_batch_size}: every decoding request takes one token of a step"
        )
    config.cache_spec()


def _check_memory(config: Config) -> None:
    cache = config.cache
    if isinstance(config.device.memory, float):
        raise ConfigError(
            f"device.memory {config.device.memory} must be a size such as 80GiB: it is what fractions are of"
        )
    if isinstance(cache.host_memory, float):
        raise ConfigError(f"cache.host_memory {cache.host_memory} must be a size such as 4GiB, not a fraction")
    if (cache.device_memory is None) == (cache.num_device_blocks is None):
        raise ConfigError("give exactly one of cache.device_memory and cache.num_device_blocks")
    for key, value in (
        ("device.memory", config.device.memory),
        ("cache.device_memory", cache.device_memory),
        ("cache.host_memory", cache.host_memory),
    ):
        if value is not None:
            with at(key):
                MemoryBudget.parse(value)


def _has_host(cache: CacheConfig) -> bool:
    """Whether there is a host pool: "0" and 0 bytes are none."""
    has_memory = cache.host_memory is not None and MemoryBudget.parse(cache.host_memory).resolve(None) > 0
    return has_memory or bool(cache.num_host_blocks)


def _check_storage(storage: StorageConfig, cache: CacheConfig) -> None:
    if not _has_host(cache):
        raise ConfigError(
            "storage: records pass through the host cache, and there is none; set cache.host_memory (with "
            "cache.manager v1) or remove the storage section"
        )
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "storage: without prefix caching nothing is ever found; set cache.enable_prefix_caching: true"
        )
    for key in ("max_bytes", "segment_bytes"):
        value = getattr(storage, key)
        with at(f"storage.{key}"):
            if isinstance(value, float) or MemoryBudget.parse(value).resolve(None) < 1:
                raise ConfigError(f"{value!r} must be a size of at least 1 byte, such as 4GiB")


def _check_kv_events(events: KVEventsConfig, cache: CacheConfig) -> None:
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "kv_events: without prefix caching no block can ever be found; set cache.enable_prefix_caching: true"
        )
    if events.replay_endpoint is not None and events.endpoint is None:
        raise ConfigError("kv_events.replay_endpoint replays what kv_events.endpoint sent; set kv_events.endpoint too")


def _main_geometry(model: ModelConfig) -> AttentionGeometry:
    return AttentionGeometry(
        kind=AttentionKind(model.attention),
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        index_head_dim=model.index_head_dim,
    )


def _mtp_geometry(model: ModelConfig, speculation: SpeculationConfig | None) -> AttentionGeometry | None:
    """The main model's geometry with the dims that speculation names; dims of another attention kind are dropped."""
    if speculation is None:
        return None
    kind = AttentionKind(speculation.attention or model.attention)
    if kind in (AttentionKind.MHA, AttentionKind.GQA):
        return AttentionGeometry(
            kind=kind,
            num_layers=speculation.num_layers,
            num_kv_heads=speculation.num_kv_heads or model.num_kv_heads,
            head_dim=speculation.head_dim or model.head_dim,
            v_head_dim=speculation.v_head_dim or model.v_head_dim,
        )
    return AttentionGeometry(
        kind=kind,
        num_layers=speculation.num_layers,
        num_kv_heads=speculation.num_kv_heads,
        head_dim=speculation.head_dim,
        v_head_dim=speculation.v_head_dim,
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        index_head_dim=model.index_head_dim if kind is AttentionKind.DSA else 0,
    )


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """FASTKV_SECTION__KEY variables as dotted overrides; their values are YAML scalars."""
    found: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        parts = name[len(ENV_PREFIX) :].lower().split("__")
        if len(parts) != 2:
            raise ConfigError(f"environment variable {name}: expected {ENV_PREFIX}<SECTION>__<KEY>")
        with at(f"environment variable {name}"):
            found[".".join(parts)] = parse_scalar(text)
    return found


def parse_scalar(text: str) -> Any:
    """A key's value given as text, as YAML reads it: "4" is a number, "true" a truth value. Raises ConfigError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r} is no YAML scalar: {error}") from error
