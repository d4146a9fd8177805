"""What is in a store on disk: read without a lock, beside running engines. Changes nothing.

Called by the command line. Counts are of one moment; a record that its writer replaces while it is checked is neither
good nor bad, it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fastkv.storage.fileops import FileOps
from fastkv.storage.folder import NamespaceFolder, RankFolder
from fastkv.storage.format import (
    ENTRY_BYTES,
    HEADER_BYTES,
    IndexIdentity,
    Record,
    decode_entries,
    decode_entry,
    entry_array,
    entry_offset,
    payload_checksum,
)
from fastkv.storage.index_file import INDEX_NAME
from fastkv.storage.segment import SegmentFiles


@dataclass(frozen=True, slots=True)
class RankSurvey:
    """One rank's records.

    Attributes:
        folder: where they are, and who writes there.
        identity: how the segments are cut; None if the index is missing, torn or foreign: then nothing counts.
        records: the valid entries.
        num_slots: slots that are allocated.
        num_torn: entries that are neither empty nor valid; they count as empty.
    """

    folder: RankFolder
    identity: IndexIdentity | None
    records: tuple[Record, ...]
    num_slots: int
    num_torn: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the records themselves."""
        return sum(record.length for record in self.records)


@dataclass(frozen=True, slots=True)
class NamespaceSurvey:
    """One namespace's records.

    Attributes:
        folder: where they are, and what they are.
        ranks: each rank's part.
        num_complete: blocks that every writing rank has, which is what a lookup can find; None without a description.
    """

    folder: NamespaceFolder
    ranks: tuple[RankSurvey, ...]
    num_complete: int | None

    @property
    def num_records(self) -> int:
        """Records of all ranks."""
        return sum(len(rank.records) for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Outcome of checking one rank's payloads.

    Attributes:
        good: records whose bytes match their checksum.
        changed: records that were replaced or removed meanwhile.
        corrupt: records whose bytes do not match, or are not there; a read of them is a miss.
    """

    good: int
    changed: int
    corrupt: tuple[Record, ...]


def survey_namespace(folder: NamespaceFolder) -> NamespaceSurvey:
    """Read the indexes of a namespace.

    Raises:
        OSError: the disk failed.
    """
    ranks = tuple(survey_rank(rank, folder.digest) for rank in folder.ranks)
    complete: int | None = None
    if folder.description is not None:
        by_rank = {rank.folder.rank: {record.digest for record in rank.records} for rank in ranks}
        wanted = [by_rank.get(rank, set()) for rank in range(folder.description.num_writers)]
        complete = len(set.intersection(*wanted))
    return NamespaceSurvey(folder, ranks, complete)


def survey_rank(folder: RankFolder, namespace: bytes, ops: FileOps | None = None) -> RankSurvey:
    """Read one rank's index.

    Raises:
        OSError: the disk failed.
    """
    ops = ops or FileOps()
    try:
        fd = ops.open(folder.path / INDEX_NAME, writable=False)
    except FileNotFoundError:
        return RankSurvey(folder, None, (), 0, 0)
    try:
        identity = IndexIdentity.decode(ops.read(fd, HEADER_BYTES, 0))
        if identity is None or (identity.namespace, identity.rank) != (namespace, folder.rank):
            return RankSurvey(folder, None, (), 0, 0)
        table = ops.read(fd, ops.size(fd) - HEADER_BYTES, HEADER_BYTES)
    finally:
        ops.close(fd)
    records = decode_entries(table, 0, identity.seed)
    used = int((entry_array(table)["magic"] != 0).sum())
    return RankSurvey(folder, identity, tuple(records), len(table) // ENTRY_BYTES, used - len(records))


def verify_rank(
    rank: RankSurvey, on_record: Callable[[int], None] = lambda nbytes: None, ops: FileOps | None = None
) -> VerifyResult:
    """Read every payload of a rank and compare it with its checksum.

    Args:
        rank: from survey_rank.
        on_record: called after each record with its length in bytes.
        ops: the system calls; another one in tests.

    Raises:
        OSError: the index cannot be read any more.
    """
    if rank.identity is None:
        return VerifyResult(0, 0, ())
    ops = ops or FileOps()
    segments = SegmentFiles(rank.folder.path, rank.identity, ops, writable=False)
    buffer = memoryview(bytearray(rank.identity.record_bytes))
    good, suspects = 0, []
    try:
        for record in sorted(rank.records, key=lambda r: r.slot):
            if _matches(record, segments, buffer, rank.identity.seed):
                good += 1
            else:
                suspects.append(record)
            on_record(record.length)
    finally:
        segments.close()
    corrupt = _still_listed(rank.folder.path, suspects, rank.identity.seed, ops)
    return VerifyResult(good, len(suspects) - len(corrupt), tuple(corrupt))


def _matches(record: Record, segments: SegmentFiles, buffer: memoryview, seed: int) -> bool:
    if record.length > len(buffer):
        return False
    view = buffer[: record.length]
    try:
        segments.read_into(record.slot, view)
    except OSError:  # unreadable is what this looks for: the record is reported as corrupt
        return False
    return payload_checksum(view, seed) == record.payload_sum


def _still_listed(path: Path, suspects: Iterable[Record], seed: int, ops: FileOps) -> list[Record]:
    """Those whose entry still says the same: nobody replaced them while they were read."""
    try:
        fd = ops.open(path / INDEX_NAME, writable=False)
    except FileNotFoundError:
        return []
    try:
        listed = []
        for record in suspects:
            data = ops.read(fd, ENTRY_BYTES, entry_offset(record.slot))
            now = decode_entry(data, record.slot, seed) if len(data) == ENTRY_BYTES else None
            if now is not None and (now.digest, now.payload_sum) == (record.digest, record.payload_sum):
                listed.append(record)
        return listed
    finally:
        ops.close(fd)
