"""FileStoreConfig: where the file backend keeps records and how much, and how a share of it is cut into slots.

Made by whoever reads the configuration; used by everything that opens a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastkv.errors import ConfigError
from fastkv.storage.base import Durability
from fastkv.storage.folder import LOCK_BYTES
from fastkv.storage.format import ENTRY_BYTES, HEADER_BYTES, MAX_SEGMENTS, slot_bytes_for
from fastkv.storage.namespace import StorageNamespace

_MIN_SEGMENTS = 8  # a small store is cut into this many, so that it grows in steps
_STORE_OVERHEAD_BYTES = 4096  # marker and folder lock
_MAX_RECORD_BYTES = 2**32 - 1  # an entry's length is 32 bits


@dataclass(frozen=True, slots=True)
class FileStoreConfig:
    """Settings of the file backend.

    Attributes:
        path: the store's folder.
        max_bytes: limit of all files in it, over all ranks and namespaces.
        durability: what an acknowledged put survives.
        segment_bytes: largest segment file, unless the store is so large that it needs larger ones.
        io_threads: threads that move one batch, the caller's included.
        lock_timeout_s: how long to wait for another process that is opening or growing the same store.
    """

    path: Path
    max_bytes: int
    durability: Durability = Durability.PROCESS
    segment_bytes: int = 256 << 20
    io_threads: int = 2
    lock_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        for name in ("max_bytes", "segment_bytes", "io_threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"storage.{name} must be an integer of at least 1, got {value!r}")
        if not isinstance(self.durability, Durability):
            allowed = ", ".join(kind.value for kind in Durability)
            raise ConfigError(f"storage.durability {self.durability!r} is not allowed; allowed: {allowed}")
        if not self.lock_timeout_s >= 0:
            raise ConfigError(f"storage.lock_timeout_s must be at least 0, got {self.lock_timeout_s!r}")


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one writing rank may use.

    Attributes:
        capacity_slots: records that fit, entries and headers counted.
        slots_per_segment: how a new store is cut.
    """

    capacity_slots: int
    slots_per_segment: int

    @classmethod
    def of(cls, config: FileStoreConfig, namespace: StorageNamespace) -> RankShare:
        """An equal share of the limit for each writing rank.

        Raises:
            ConfigError: not even one record fits, or records are too large for the format.
        """
        record_bytes = namespace.record_bytes
        if not 1 <= record_bytes <= _MAX_RECORD_BYTES:
            raise ConfigError(f"records of {record_bytes} bytes; the file backend takes 1 to {_MAX_RECORD_BYTES} bytes")
        unit = slot_bytes_for(record_bytes) + ENTRY_BYTES
        shared = _STORE_OVERHEAD_BYTES + 2 * len(namespace.to_json())  # twice while it is being replaced
        fixed = LOCK_BYTES + 2 * HEADER_BYTES  # likewise
        capacity = ((config.max_bytes - shared) // namespace.num_writers - fixed) // unit
        if capacity < 1:
            needed = shared + namespace.num_writers * (fixed + unit)
            raise ConfigError(
                f"storage.max_bytes {config.max_bytes} holds no record of {record_bytes} bytes for each of "
                f"{namespace.num_writers} ranks; give at least {needed}"
            )
        slots = min(max(1, config.segment_bytes // slot_bytes_for(record_bytes)), -(-capacity // _MIN_SEGMENTS))
        return cls(capacity, max(slots, -(-capacity * 4 // MAX_SEGMENTS)))
