"""Strict configuration: every mistake is a ConfigError with key path, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.toy import toy_data

from fastkv.config import load_config, parse_config
from fastkv.errors import ConfigError

ROOT = Path(__file__).parents[2]


def broken(path: str, value: Any) -> dict[str, Any]:
    data = toy_data()
    section, key = path.split(".")
    data.setdefault(section, {})[key] = value
    return data


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_config_shipped_files_are_valid_and_plan(path: Path) -> None:
    assert load_config(path).capacity_plan().num_device_blocks >= 1


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("cache.block_sise", 4, ["cache", "'block_sise'", "did you mean block_size"]),
        ("cache.block_size", "four", ["cache.block_size", "'four'", "int"]),
        ("cache.block_size", 0, ["cache.block_size", "0", ">= 1"]),
        ("cache.block_size", 4.5, ["cache.block_size", "4.5"]),
        ("cache.block_size", True, ["cache.block_size", "True"]),
        ("cache.copy_threads", 257, ["cache.copy_threads", "257", "<= 256"]),
        ("cache.manager", "v2", ["cache.manager", "'v2'", "v0, v1"]),
        ("cache.kv_cache_quant_type", "int3", ["cache.kv_cache_quant_type", "'int3'", "block_wise_fp8"]),
        ("cache.kv_cache_quant_type", 8, ["cache.kv_cache_quant_type", "8"]),
        ("cache.enable_prefix_caching", "yes", ["cache.enable_prefix_caching", "'yes'", "bool"]),
        ("cache.num_host_blocks", -1, ["cache.num_host_blocks", "-1"]),
        ("cache.scale_granularity", "block", ["cache.scale_granularity", "'block'", "channel, head, tensor"]),
        ("cache.device_memory", "1GiB", ["exactly one", "device_memory", "num_device_blocks"]),
        ("cache.host_memory", 0.5, ["cache.host_memory", "0.5"]),
        ("device.memory", "many", ["device.memory", "'many'"]),
        ("device.memory", 0.5, ["device.memory", "0.5", "size such as 80GiB"]),
        ("cache.host_memory", "0.5", ["cache.host_memory", "'0.5'"]),
        ("cache.num_device_blocks", 10**21, ["cache.num_device_blocks", "<= 2147483647"]),
        ("model.kv_lora_rank", 512, ["gqa attention has no kv_lora_rank, got 512"]),
        ("device.type", "tpu", ["device.type", "'tpu'", "cpu, gpu"]),
        ("model.dtype", "float64", ["model.dtype", "'float64'", "bfloat16"]),
        ("model.attention", "linear", ["model.attention", "'linear'", "gqa"]),
        ("model.num_kv_heads", 3, ["num_attention_heads 4", "num_kv_heads 3"]),
        ("model.num_layers", None, ["model.num_layers", "None"]),
        ("parallel.tensor_parallel_size", 3, ["tensor_parallel_size 3", "num_attention_heads 4"]),
        ("speculation.num_draft_tokens", 4, ["speculation", "'num_draft_tokens'", "block_expand_ratio"]),
        ("speculation.method", "eagle", ["speculation.method", "'eagle'", "mtp"]),
        ("cache.transfer_timeout_s", float("inf"), ["cache.transfer_timeout_s", "inf", "31536000"]),
        ("cache.transfer_timeout_s", float("nan"), ["cache.transfer_timeout_s", "nan"]),
        ("cache.transfer_timeout_s", 1e300, ["cache.transfer_timeout_s", "1e+300"]),
        ("modle.name", "x", ["'modle'", "did you mean model", "speculation"]),
    ],
)
def test_config_mistake_names_key_value_and_allowed(path: str, value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(broken(path, value))
    for part in parts:
        assert part in str(error.value)


def test_config_missing_key_is_named() -> None:
    data = toy_data()
    del data["model"]["num_layers"]
    with pytest.raises(ConfigError, match="model: the key 'num_layers' is missing"):
        parse_config(data)


def test_config_mha_with_fewer_kv_heads_is_refused() -> None:
    data = toy_data("mha")
    data["model"]["num_kv_heads"] = 1
    with pytest.raises(ConfigError, match="use gqa"):
        parse_config(data)


def test_config_v0_with_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="v0 owns device caches only"):
        parse_config(toy_data(manager="v0", host_memory="1GiB"))
    assert parse_config(toy_data(manager="v0", host_memory="0")).capacity_plan().num_host_blocks == 0


@pytest.mark.parametrize("host_memory", [0, "0", "0GiB", "0.1", None])
def test_config_storage_without_a_host_block_is_refused(host_memory: int | str | None) -> None:
    """A size of "0" is a true text; the worker opened the store before it found no host cache to attach it to."""
    data = toy_data(num_host_blocks=0, host_memory=host_memory)
    data["storage"] = {"path": "store", "max_bytes": "1GiB"}
    with pytest.raises(ConfigError):
        parse_config(data)


def test_config_storage_seconds_are_finite() -> None:
    data = toy_data()
    for key in ("lookup_timeout_s", "get_timeout_s", "put_timeout_s", "cooldown_s"):
        data["storage"] = {"path": "store", "max_bytes": "1GiB", key: float("inf")}
        with pytest.raises(ConfigError, match=f"storage.{key}"):
            parse_config(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", r"no valid YAML: while parsing a flow node\n.*\n *line 1, column 9"),
        ("- a\n- b", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("model: {name: a, name: b}", "key 'name' is given twice"),
        ("model: 3\ncache: {}", "model: 3 is not allowed; expected a mapping with the keys name"),
        ("base_dir: 17", "unknown key 'base_dir'"),
        ("? [1, 2]\n: 3", "no valid YAML"),
        ("1: 2", "key 1 is no word"),
    ],
)
def test_config_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert "broken.yaml" in str(error.value)


def test_config_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_config_later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_data()))
    monkeypatch.setenv("FASTKV_CACHE__BLOCK_SIZE", "8")
    monkeypatch.setenv("FASTKV_SCHEDULER__MAX_BATCH_SIZE", "3")
    config = load_config(path, {"cache.block_size": 16})
    assert (config.cache.block_size, config.scheduler.max_batch_size) == (16, 3)
    assert config.resolve_path("scales.json") == tmp_path / "scales.json"


@pytest.mark.parametrize(("name", "value"), [("FASTKV_CACHE__SISE", "8"), ("FASTKV_BLOCKS", "8")])
def test_config_unknown_environment_variable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_data()))
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        load_config(path)


def test_config_mtp_geometry_defaults_to_the_main_models() -> None:
    data = toy_data()
    data["speculation"].update(head_dim=16, block_expand_ratio=2)
    mtp = parse_config(data).cache_spec().group("mtp")
    assert (mtp.geometry.head_dim, mtp.geometry.num_kv_heads, mtp.expand_ratio) == (16, 2, 2)
