"""Configs of real models: bytes per token against numbers worked out by hand from the published geometry."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastkv.config import Config, load_config
from fastkv.core.plan import MemoryBudget
from fastkv.core.spec import Role
from fastkv.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1024**3
BF16, F32, BYTE = 2, 4, 1
KEY_AND_VALUE = 2

# file -> quantisation type -> bytes of one token on one rank
QWEN3_8B = 36 * KEY_AND_VALUE * 8 * 128  # layers, KV heads, head_dim
LLAMA_70B_RANK = 80 * KEY_AND_VALUE * (8 // 8) * 128  # one of 8 KV heads on each of 8 ranks
ERNIE_21B = (28 + 1) * KEY_AND_VALUE * 4 * 128  # 28 layers and one of MTP
DEEPSEEK_V3 = (61 + 1) * (512 + 64)  # one latent a layer, on every rank the same
DEEPSEEK_V32 = (61 + 1) * ((512 * BYTE + 512 // 128 * F32 + 64 * BF16) + (128 * BYTE + 128 // 128 * F32))
BYTES_PER_TOKEN = {
    ("qwen3-8b", "none"): QWEN3_8B * BF16,
    ("qwen3-8b", "int8"): QWEN3_8B,
    ("qwen3-8b", "int4_zp"): QWEN3_8B // 2,
    ("qwen3-8b", "block_wise_fp8"): QWEN3_8B + 36 * KEY_AND_VALUE * 8 * F32,  # and a scale for each token and head
    ("llama-3.1-70b-tp8", "none"): LLAMA_70B_RANK * BF16,
    ("llama-3.1-70b-tp8", "fp8"): LLAMA_70B_RANK,
    ("llama-3.1-70b-tp8", "block_wise_fp8"): LLAMA_70B_RANK + 80 * KEY_AND_VALUE * F32,
    ("ernie-4.5-21b-a3b-mtp", "none"): ERNIE_21B * BF16,
    ("ernie-4.5-21b-a3b-mtp", "int8_zp"): ERNIE_21B,
    ("ernie-4.5-21b-a3b-mtp", "int4_zp"): ERNIE_21B // 2,
    ("deepseek-v3", "none"): DEEPSEEK_V3 * BF16,
    ("deepseek-v3", "fp8"): DEEPSEEK_V3,
    ("deepseek-v3.2", "none"): DEEPSEEK_V32,
}


def load(name: str, quant_type: str = "none") -> Config:
    return load_config(CONFIGS / f"{name}.yaml", {"cache.kv_cache_quant_type": quant_type})


@pytest.mark.parametrize(("name", "quant_type"), BYTES_PER_TOKEN)
def test_model_config_bytes_per_token_are_the_published_geometrys(name: str, quant_type: str) -> None:
    spec = load(name, quant_type).cache_spec()
    assert spec.block_bytes == BYTES_PER_TOKEN[name, quant_type] * spec.block_size


def test_model_config_bytes_per_token_as_plain_numbers() -> None:
    """The same once more as numbers that are quoted elsewhere, so that a slip in the arithmetic above shows."""
    assert BYTES_PER_TOKEN["qwen3-8b", "none"] == 144 * 1024
    assert BYTES_PER_TOKEN["llama-3.1-70b-tp8", "none"] * 8 == 320 * 1024
    assert BYTES_PER_TOKEN["ernie-4.5-21b-a3b-mtp", "none"] == 58 * 1024
    assert BYTES_PER_TOKEN["deepseek-v3", "none"] == 62 * 1152
    assert BYTES_PER_TOKEN["deepseek-v3.2", "none"] == 62 * (656 + 132)


@pytest.mark.parametrize("name", sorted({name for name, _ in BYTES_PER_TOKEN}))
def test_model_config_plan_stays_within_one_block_of_its_share_of_the_device(name: str) -> None:
    config = load(name)
    plan = config.capacity_plan()
    assert config.device.memory is not None
    assert isinstance(config.cache.device_memory, float)
    budget = int(MemoryBudget.parse(config.device.memory).resolve(None) * config.cache.device_memory)
    assert budget - plan.spec.pool_block_bytes < plan.device_bytes <= budget
    assert plan.num_host_blocks * plan.spec.record_stride_bytes <= 64 * GIB
    assert plan.full_length_requests(config.model.max_context) >= 3


def test_model_config_tensor_parallel_ranks_share_heads_but_not_latents() -> None:
    llama, deepseek = load("llama-3.1-70b-tp8").cache_spec(), load("deepseek-v3").cache_spec()
    key = llama.group("main").role(Role.KEY)
    assert key is not None
    assert key.block_shape == (1, 64, 128)
    latent = deepseek.group("main").role(Role.LATENT)
    assert latent is not None
    assert latent.block_shape == (1, 64, 576)
    assert not llama.is_replicated
    assert deepseek.is_replicated


def test_model_config_mtp_layer_follows_the_main_layers() -> None:
    for name, layer in (("ernie-4.5-21b-a3b-mtp", 28), ("deepseek-v3", 61), ("deepseek-v3.2", 61)):
        spec = load(name).cache_spec()
        assert list(spec.group("mtp").layers) == [layer]
        assert spec.group("mtp").layer_block_bytes == spec.group("main").layer_block_bytes


@pytest.mark.parametrize(("name", "quant_type"), [("deepseek-v3", "int8"), ("deepseek-v3.2", "fp8")])
def test_model_config_with_a_type_its_attention_lacks_is_refused(name: str, quant_type: str) -> None:
    with pytest.raises(ConfigError, match="is not supported with"):
        load(name, quant_type)
