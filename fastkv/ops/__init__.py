"""Python faces of the compiled ops, and the frozen views they take.

Called by the worker and by engines that embed fastkv. Names are loaded when first used, so that
`fastkv.ops.reference`, the NumPy meaning of every op, imports without paddle.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastkv.ops._load import force_isa, load_ops, supported_isas
    from fastkv.ops.attention import append_attention, append_attention_qkv, mla_append_attention
    from fastkv.ops.batch import AttentionBatch, Rope
    from fastkv.ops.blocks import copy_blocks, gather_cache, write_cache
    from fastkv.ops.cache import LayerCache, StaticScales

_HOME = {
    "AttentionBatch": "batch",
    "LayerCache": "cache",
    "Rope": "batch",
    "StaticScales": "cache",
    "append_attention": "attention",
    "append_attention_qkv": "attention",
    "copy_blocks": "blocks",
    "force_isa": "_load",
    "gather_cache": "blocks",
    "load_ops": "_load",
    "mla_append_attention": "attention",
    "supported_isas": "_load",
    "write_cache": "blocks",
}

__all__ = [
    "AttentionBatch",
    "LayerCache",
    "Rope",
    "StaticScales",
    "append_attention",
    "append_attention_qkv",
    "copy_blocks",
    "force_isa",
    "gather_cache",
    "load_ops",
    "mla_append_attention",
    "supported_isas",
    "write_cache",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"fastkv.ops.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
