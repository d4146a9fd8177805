"""fastkv: a KV-cache manager for PaddlePaddle LLM inference.

Importing this package does not import paddle; the names of the worker side are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fastkv.config import Config, load_config, parse_config
from fastkv.core.digest import Identity
from fastkv.core.dtype import KVCacheQuantType, resolve_cache_dtype
from fastkv.core.spec import CacheSpec
from fastkv.errors import (
    ConfigError,
    FastKVError,
    InvariantError,
    OutOfBlocksError,
    RequestError,
    StorageError,
    TransferError,
    WorkerError,
)
from fastkv.scheduler.manager import CacheManager

if TYPE_CHECKING:
    from fastkv.worker.controller import CacheController
    from fastkv.worker.runner_cache import RunnerCache
    from fastkv.worker.static_scales import load_static_scales

__version__ = "0.1.0"

__all__ = [
    "CacheController",
    "CacheManager",
    "CacheSpec",
    "Config",
    "ConfigError",
    "FastKVError",
    "Identity",
    "InvariantError",
    "KVCacheQuantType",
    "OutOfBlocksError",
    "RequestError",
    "RunnerCache",
    "StorageError",
    "TransferError",
    "WorkerError",
    "load_config",
    "load_static_scales",
    "parse_config",
    "resolve_cache_dtype",
]

_NEEDS_PADDLE = {
    "CacheController": "fastkv.worker.controller",
    "RunnerCache": "fastkv.worker.runner_cache",
    "load_static_scales": "fastkv.worker.static_scales",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_PADDLE:
        return getattr(importlib.import_module(_NEEDS_PADDLE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
