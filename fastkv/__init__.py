"""fastkv: a KV-cache manager for PaddlePaddle LLM inference.

Every public name is loaded when it is first used: `import fastkv` costs nothing, and only the names of the worker side
import paddle.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "fastkv.config": ("Config", "load_config", "parse_config"),
    "fastkv.core.digest": ("Identity",),
    "fastkv.core.dtype": ("KVCacheQuantType", "resolve_cache_dtype"),
    "fastkv.core.spec": ("CacheSpec",),
    "fastkv.scheduler.manager": ("CacheManager",),
    "fastkv.worker.controller": ("CacheController",),
    "fastkv.worker.runner_cache": ("RunnerCache",),
    "fastkv.worker.static_scales": ("load_static_scales",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(importlib.import_module(_HOMES.get(name, "fastkv.errors")), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Without the worker's names: help() and inspect load whatever is listed, and must not import paddle."""
    return sorted({*globals(), *(name for name in __all__ if not _HOMES.get(name, "").startswith("fastkv.worker."))})
