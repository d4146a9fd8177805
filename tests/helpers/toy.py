"""The toy of the fault catalogue: 2 main layers + 1 MTP layer, 2 KV heads, block_size 4, head_dim 8."""

from __future__ import annotations

from typing import Any

from fastkv.config import Config, parse_config

DSA = {"kv_lora_rank": 128, "qk_rope_head_dim": 16, "index_head_dim": 128}
GEOMETRY: dict[str, dict[str, Any]] = {
    "mha": {"num_attention_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    "gqa": {"num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "mla": {"num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    "dsa": {"num_attention_heads": 4, **DSA},
}


def toy_data(
    attention: str = "gqa",
    *,
    dtype: str = "bfloat16",
    quant_type: str | None = None,
    manager: str = "v1",
    mtp: bool = True,
    num_device_blocks: int = 4,
    num_host_blocks: int = 3,
    tp_size: int = 1,
    **cache: Any,
) -> dict[str, Any]:
    """The toy's config as nested dicts, for tests that change a key before it is parsed."""
    data: dict[str, Any] = {
        "model": {
            "name": "toy",
            "attention": attention,
            "dtype": dtype,
            "num_layers": 2,
            "max_context": 64,
            **GEOMETRY[attention],
        },
        "cache": {
            "manager": manager,
            "kv_cache_quant_type": quant_type,
            "block_size": 4,
            "num_device_blocks": num_device_blocks,
            **cache,
        },
        "parallel": {"tensor_parallel_size": tp_size},
    }
    if manager == "v1" and num_host_blocks:
        data["cache"]["num_host_blocks"] = num_host_blocks
    if mtp:
        data["speculation"] = {"num_layers": 1}
    return data


def toy_config(attention: str = "gqa", **options: Any) -> Config:
    """The toy's config, validated."""
    return parse_config(toy_data(attention, **options))
