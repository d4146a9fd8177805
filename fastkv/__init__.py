"""fastkv: a KV-cache manager for PaddlePaddle LLM inference. Importing it does not import paddle."""

from fastkv.core.dtype import KVCacheQuantType, resolve_cache_dtype
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

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "FastKVError",
    "InvariantError",
    "KVCacheQuantType",
    "OutOfBlocksError",
    "RequestError",
    "StorageError",
    "TransferError",
    "WorkerError",
    "resolve_cache_dtype",
]
