"""Rows `file_put` and `file_get`: the file backend beside raw pwrite and pread of the same bytes.

Used by benchmarks/tiers.py; runs alone too: python benchmarks/storage_rows.py [FOLDER]. All are measured in turn in
each round and the best round counts, so that they see the same machine. The bound is the better of one and of two
threads that only copy: no headers, no index, no checksums. Both sides write into preallocated files and stay in the
page cache; after the first round every put evicts.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastkv.core.dtype import AttentionKind
from fastkv.core.geometry import AttentionGeometry
from fastkv.core.spec import CacheSpec
from fastkv.storage import FileConnector, FileStoreConfig, StorageNamespace
from fastkv.storage.base import NO_DEADLINE
from fastkv.storage.format import ENTRY_BYTES, slot_bytes_for


@dataclass(frozen=True, slots=True)
class StorageRow:
    """One figure of the report.

    Attributes:
        name: file_put or file_get.
        record_bytes: bytes of one record.
        gb_per_s: of the backend, 1e9 bytes a second.
        bound, bound_gb_per_s: what it is compared with.
    """

    name: str
    record_bytes: int
    gb_per_s: float
    bound: str
    bound_gb_per_s: float

    @property
    def ratio(self) -> float:
        """The backend's share of the bound."""
        return self.gb_per_s / self.bound_gb_per_s


def storage_rows(
    folder: Path, record_bytes: int = 1 << 20, num_records: int = 48, batch: int = 16, rounds: int = 9
) -> list[StorageRow]:
    """Measure file_put and file_get.

    Args:
        folder: on the disk to be measured; needs 2 x record_bytes x num_records, given back at the end.
        record_bytes: bytes of one record.
        num_records: records of one round, and of the whole store: every put after the first round evicts.
        batch: records of one call.
        rounds: of which the best counts.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        bench = _Bench(Path(scratch), record_bytes, num_records, batch)
        try:
            return bench.run(rounds)
        finally:
            bench.close()


class _Bench:
    def __init__(self, folder: Path, record_bytes: int, num_records: int, batch: int) -> None:
        self.record_bytes, self.num_records, self.batch = record_bytes, num_records, batch
        toy = CacheSpec.build(AttentionGeometry(AttentionKind.GQA, 1, 1, 8), model_dtype="float32", block_size=1)
        namespace = replace(StorageNamespace.from_spec(toy, model="benchmark"), record_bytes=record_bytes)
        limit = num_records * (slot_bytes_for(record_bytes) + ENTRY_BYTES) + 65536
        self.store = FileConnector.open(FileStoreConfig(folder / "store", limit), namespace, 0)
        self.raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self.raw, 0, num_records * record_bytes)
        self.pool = ThreadPoolExecutor(1)
        self.source = np.random.default_rng(0).integers(0, 256, (num_records, record_bytes), dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.digests: list[bytes] = []

    def run(self, rounds: int) -> list[StorageRow]:
        best: dict[str, float] = {}
        for number in range(rounds):
            self.digests = [hashlib.sha256(b"%d %d" % (number, row)).digest() for row in range(self.num_records)]
            for name, work in (
                ("pwrite", lambda: self._raw(self._pwrite, 1)),
                ("pwrite x2", lambda: self._raw(self._pwrite, 2)),
                ("file_put", self._put),
                ("pread", lambda: self._raw(self._pread, 1)),
                ("pread x2", lambda: self._raw(self._pread, 2)),
                ("file_get", self._get),
            ):
                started = time.perf_counter()
                work()
                best[name] = min(best.get(name, float("inf")), time.perf_counter() - started)
        assert (self.target == self.source).all()
        rate = {name: self.source.nbytes / seconds / 1e9 for name, seconds in best.items()}
        return [self._row("file_put", "pwrite", rate), self._row("file_get", "pread", rate)]

    def close(self) -> None:
        self.pool.shutdown()
        self.store.close()
        os.close(self.raw)

    def _row(self, name: str, raw: str, rate: dict[str, float]) -> StorageRow:
        bound = max((raw, f"{raw} x2"), key=rate.__getitem__)
        return StorageRow(name, self.record_bytes, rate[name], bound, rate[bound])

    def _raw(self, call: Callable[[int], None], threads: int) -> None:
        def each(rows: range) -> None:
            for row in rows:
                call(row)

        for start in range(0, self.num_records, self.batch):
            middle, stop = start + self.batch // threads, min(start + self.batch, self.num_records)
            other = self.pool.submit(each, range(middle, stop)) if threads == 2 else None
            each(range(start, min(middle, stop)))
            if other is not None:
                other.result()

    def _pwrite(self, row: int) -> None:
        assert os.pwrite(self.raw, self.source[row], row * self.record_bytes) == self.record_bytes

    def _pread(self, row: int) -> None:
        assert os.preadv(self.raw, [self.target[row]], row * self.record_bytes) == self.record_bytes

    def _put(self) -> None:
        for start in range(0, self.num_records, self.batch):
            part = slice(start, start + self.batch)
            outcomes = self.store.put(self.digests[part], list(self.source[part]), NO_DEADLINE)
            assert all(outcome.value == "stored" for outcome in outcomes)

    def _get(self) -> None:
        for start in range(0, self.num_records, self.batch):
            part = slice(start, start + self.batch)
            outcomes = self.store.get_into(self.digests[part], list(self.target[part]), NO_DEADLINE)
            assert all(outcome.is_hit for outcome in outcomes)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    for record_bytes in (64 << 10, 1 << 20, 4 << 20):
        for row in storage_rows(folder, record_bytes, num_records=max(16, (48 << 20) // record_bytes)):
            print(
                f"{row.name} {record_bytes >> 10:5d} KiB  {row.gb_per_s:5.2f} GB/s  "
                f"{row.bound} {row.bound_gb_per_s:5.2f} GB/s  ratio {row.ratio:.2f}"
            )


if __name__ == "__main__":
    main()
