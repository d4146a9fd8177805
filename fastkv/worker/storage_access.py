"""StorageAccess: one rank's way to storage. Which namespace, which backend, how long a batch may take.

Made from the config by `open_storage`, handed to the CacheController, used by its CopyEngine. Host records go to and
from the backend in place; a backend that is slow, full or broken gives outcomes and counters, never an error. Imports
no paddle: the engine's side reads the settings here, and must not load Paddle before its environment is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fastkv.config import Config, StorageConfig
from fastkv.core.dtype import ScaleKind
from fastkv.core.plan import MemoryBudget
from fastkv.core.spec import Level
from fastkv.core.transfers import TransferStage
from fastkv.errors import ConfigError
from fastkv.storage import FileStoreConfig, StorageConnector, StorageNamespace, open_connector
from fastkv.storage.base import Buffer, Durability, GetOutcome, PutOutcome, deadline_in
from fastkv.storage.namespace import Scalar, digest_scales
from fastkv.storage.ticket import StorageTicket, finished
from fastkv.storage.write_behind import StorageWorker, StorageWorkerConfig
from fastkv.worker.static_scales import load_static_scales, named_arrays

ByteArray = npt.NDArray[np.uint8]
AnyStorageTicket: TypeAlias = "StorageTicket[PutOutcome] | StorageTicket[GetOutcome]"


class StorageAccess:
    """Background lanes over the connector of one rank, rebound when the weights change.

    Args:
        open_namespace: opens this rank's connector for a namespace.
        namespace: the first one.
        bounds: of the lanes.
        put_timeout_s, get_timeout_s: what is not stored or read by then is not waited for.

    Raises:
        ConfigError, StorageError: as open_namespace.
    """

    def __init__(
        self,
        open_namespace: Callable[[StorageNamespace], StorageConnector],
        namespace: StorageNamespace,
        bounds: StorageWorkerConfig | None = None,
        put_timeout_s: float = 30.0,
        get_timeout_s: float = 5.0,
    ) -> None:
        self._open, self._bounds = open_namespace, bounds or StorageWorkerConfig()
        self._put_timeout_s, self._get_timeout_s = put_timeout_s, get_timeout_s
        self.namespace = namespace
        self._worker: StorageWorker | None = StorageWorker(open_namespace(namespace), self._bounds)

    def start(self, stage: TransferStage, host: ByteArray) -> AnyStorageTicket:
        """Queue a stage's records. Never blocks: what finds no room in the queue is dropped, which its ticket says."""
        buffers: list[Buffer] = [host[i] for i in stage.ids(Level.HOST).tolist()]
        digests, worker = stage.digest_list(), self._worker
        if stage.destination is Level.STORAGE:
            if worker is None:
                return finished(PutOutcome.UNAVAILABLE, len(digests))
            return worker.submit_put(digests, buffers, deadline_in(self._put_timeout_s))
        if worker is None:
            return finished(GetOutcome.UNAVAILABLE, len(digests))
        return worker.submit_get(digests, buffers, deadline_in(self._get_timeout_s))

    def set_weights_version(self, version: str) -> None:
        """Read and write under a new weights version from now on; what is queued under the old one is dropped.

        Raises:
            StorageError: the new namespace cannot be opened; until a later call succeeds nothing is stored or found.
        """
        old, self._worker = self._worker, None
        self.namespace = self.namespace.with_weights_version(version)
        if old is not None:
            old.close(drain=False)
        self._worker = StorageWorker(self._open(self.namespace), self._bounds)

    def counters(self) -> dict[str, int]:
        """Events so far, by name."""
        return {} if self._worker is None else self._worker.counters()

    def last_error(self) -> str:
        """Text of the last fault, or ""."""
        return "" if self._worker is None else self._worker.last_error()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Store what is queued as far as the time allows, close the backend. False: it is stuck in a call."""
        worker, self._worker = self._worker, None
        return worker is None or worker.close(drain=True, deadline_s=deadline_in(timeout_s))


def storage_namespace(
    config: Config, weights_fingerprint: str, rope: Mapping[str, Scalar] | None = None
) -> StorageNamespace:
    """The namespace of everything that this config and these weights store.

    Args:
        config: model, caches, static scales.
        weights_fingerprint: names the weights that run.
        rope: the model's rotary parameters.

    Raises:
        ConfigError: static scales are needed and cannot be loaded.
    """
    spec = config.cache_spec()
    return StorageNamespace.from_spec(
        spec,
        model=config.model.name,
        revision=weights_fingerprint,
        rope=rope,
        scales_digest=_scales_digest(config) if spec.storage.scales is ScaleKind.STATIC else "",
    )


def file_store_config(config: Config, storage: StorageConfig) -> FileStoreConfig:
    """The file backend's settings. Relative paths start at the config's folder. Raises ConfigError."""
    sizes = {key: MemoryBudget.parse(getattr(storage, key)).resolve(None) for key in ("max_bytes", "segment_bytes")}
    return FileStoreConfig(
        path=Path(config.resolve_path(storage.path)),
        durability=Durability(storage.durability),
        io_threads=storage.io_threads,
        **sizes,
    )


def open_storage(config: Config, namespace: StorageNamespace, rank: int) -> StorageAccess:
    """Open the storage that the config names, for one rank.

    Raises:
        ConfigError: no storage section, or settings that cannot work.
        StorageError: another process writes there, or the disk failed.
    """
    storage = config.storage
    if storage is None:
        raise ConfigError("the config has no storage section; add one with path and max_bytes")
    store = file_store_config(config, storage)
    bounds = StorageWorkerConfig(storage.max_queued_records, storage.failure_limit, storage.cooldown_s)
    return StorageAccess(
        lambda space: open_connector(store, space, rank),
        namespace,
        bounds,
        storage.put_timeout_s,
        storage.get_timeout_s,
    )


def _scales_digest(config: Config) -> str:
    """Of all ranks' scales, so that every rank computes the same."""
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    for rank in range(config.parallel.tensor_parallel_size):
        arrays |= named_arrays(load_static_scales(config, rank), f"{rank}.")
    return digest_scales(arrays)
