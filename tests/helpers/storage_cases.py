"""Toy namespaces, digests and byte patterns for storage tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastkv.core.dtype import AttentionKind
from fastkv.core.geometry import AttentionGeometry
from fastkv.core.spec import CacheSpec
from fastkv.storage.base import NO_DEADLINE, GetOutcome, StorageConnector
from fastkv.storage.file_config import FileStoreConfig
from fastkv.storage.namespace import StorageNamespace

GQA = AttentionGeometry(AttentionKind.GQA, num_layers=2, num_kv_heads=2, head_dim=8)
MLA = AttentionGeometry(AttentionKind.MLA, num_layers=2, kv_lora_rank=16, qk_rope_head_dim=8)
MTP = AttentionGeometry(AttentionKind.GQA, num_layers=1, num_kv_heads=2, head_dim=8)

Record = npt.NDArray[np.uint8]


def toy_spec(main: AttentionGeometry = GQA, **options: Any) -> CacheSpec:
    """The toy of the fault catalogue: 2 layers, 2 KV heads, 4 tokens a block, head_dim 8."""
    return CacheSpec.build(main, **{"model_dtype": "bfloat16", "block_size": 4, **options})


def toy_namespace(
    main: AttentionGeometry = GQA, *, record_bytes: int | None = None, **options: Any
) -> StorageNamespace:
    """The toy's namespace; record_bytes makes its records larger than the toy's own."""
    namespace = StorageNamespace.from_spec(toy_spec(main, **options), model="toy")
    return namespace if record_bytes is None else replace(namespace, record_bytes=record_bytes)


def store_config(path: Path, namespace: StorageNamespace, records: int, **options: Any) -> FileStoreConfig:
    """A config whose limit holds exactly this many records of each rank of the namespace."""
    slot = -(-namespace.record_bytes // 4096) * 4096 + 64
    shared = 4096 + 2 * len(namespace.to_json())
    return FileStoreConfig(path, shared + namespace.num_writers * (64 + 2 * 4096 + records * slot), **options)


def digest(name: object) -> bytes:
    """A prefix digest named by anything."""
    return hashlib.sha256(repr(name).encode()).digest()


def digests(*names: object) -> list[bytes]:
    """Prefix digests named by anything."""
    return [digest(name) for name in names]


def pattern(name: object, nbytes: int) -> Record:
    """Bytes that belong to this name alone, in every 8 bytes of the record."""
    start = int.from_bytes(digest(name)[:8], "little") >> 1
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    return words.view(np.uint8)[:nbytes].copy()


def patterns(names: Sequence[object], nbytes: int) -> list[Record]:
    """A pattern for each name."""
    return [pattern(name, nbytes) for name in names]


def poisoned(count: int, nbytes: int) -> list[Record]:
    """Buffers that hold no pattern."""
    return [np.full(nbytes, 0xDB, np.uint8) for _ in range(count)]


def put(connector: StorageConnector, *names: object) -> list[str]:
    """Store each name's pattern under its digest; the outcomes' values."""
    outcomes = connector.put(digests(*names), patterns(names, connector.record_bytes), NO_DEADLINE)
    return [outcome.value for outcome in outcomes]


def get(connector: StorageConnector, *names: object, deadline_s: float = NO_DEADLINE) -> list[str]:
    """Read each name's record. Every hit must be bit-equal to the name's pattern; the outcomes' values."""
    buffers = poisoned(len(names), connector.record_bytes)
    outcomes = connector.get_into(digests(*names), buffers, deadline_s)
    for name, outcome, buffer in zip(names, outcomes, buffers, strict=True):
        if outcome is GetOutcome.HIT:
            assert buffer.tobytes() == pattern(name, connector.record_bytes).tobytes(), f"wrong bytes for {name!r}"
    return [outcome.value for outcome in outcomes]


def file_bytes(root: Path) -> int:
    """Bytes of all files below root."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
