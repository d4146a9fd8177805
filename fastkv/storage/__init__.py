"""Storage below host memory: records of blocks by prefix digest, kept by a backend that outlives the process.

`open_connector` gives a worker rank its half, `open_lookup` gives the scheduler the other. base.py says what both
promise; a backend is one more branch here. Nothing in this package imports paddle.
"""

from __future__ import annotations

from fastkv.storage.base import StorageConnector, StorageLookup
from fastkv.storage.file import FileConnector
from fastkv.storage.file_config import FileStoreConfig
from fastkv.storage.file_reader import FileLookup, FileReader
from fastkv.storage.namespace import StorageNamespace


def open_connector(config: FileStoreConfig, namespace: StorageNamespace, rank: int) -> StorageConnector:
    """The connector of one rank: a writer, or a reader where another rank stores the same bytes.

    Raises:
        ConfigError: the configuration cannot work, or no such rank.
        StorageError: another process writes there, or the disk failed.
    """
    if namespace.writer_rank(rank) == rank:
        return FileConnector.open(config, namespace, rank)
    return FileReader(config.path, namespace, rank)


def open_lookup(config: FileStoreConfig, namespace: StorageNamespace) -> StorageLookup:
    """The lookup over all ranks of a namespace. Works before the ranks have opened their connectors."""
    return FileLookup(config.path, namespace)


__all__ = [
    "FileConnector",
    "FileLookup",
    "FileReader",
    "FileStoreConfig",
    "StorageConnector",
    "StorageLookup",
    "StorageNamespace",
    "open_connector",
    "open_lookup",
]
