"""The bytes of a rank's index file: one header page, then one 64-byte entry for each slot.

    index:    | header page, 4096 B                             | entry of slot 0 | entry of slot 1 | ...
              | 0: identity (96 B, checksummed) | 504: epoch     |
              | 512: change counter of each segment, 448 x u64   |
    segments: segment-00000 holds the payloads of slots 0 .. slots_per_segment-1, slot_bytes apart, and so on

All numbers are little-endian. An entry names one record:

    0 u32 magic | 4 u32 length | 8 u64 stamp | 16 digest, 32 B | 48 u64 payload checksum | 56 u64 entry checksum

Checksums are xxh3_64, seeded by namespace and rank: bytes of another namespace or rank do not verify here. An entry
that is zero, torn or foreign decodes to None, which is an empty slot. The stamp orders records by last use as far as
the disk knows it.

One writer, any number of readers. The writer clears a slot's entry before it overwrites the payload and writes the new
entry after the payload, then raises the segment's counter in the header page. A reader compares the page with the one
it saw last and rescans the segments whose counters moved; the epoch, raised whenever a writer opens, makes it rescan
all. A reader that catches a torn page sees a different page next time, so it heals by itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

HEADER_BYTES = 4096
ENTRY_BYTES = 64
PAGE_BYTES = 4096
MAX_SEGMENTS = 448
EPOCH_OFFSET = 504
COUNTERS_OFFSET = 512
VERSION = 1

_MAGIC = b"FKVINDX1"
_ENTRY_MAGIC = 0x31564B46  # "FKV1"
_IDENTITY = struct.Struct(
    "<8sII32sIIQQ"
)  # magic, version, rank, namespace, slots_per_segment, 0, slot_bytes, max record
_ENTRY = struct.Struct("<IIQ32sQ")
_U64 = struct.Struct("<Q")

ENTRY_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("length", "<u4"),
        ("stamp", "<u8"),
        ("digest", "u1", (32,)),
        ("payload_sum", "<u8"),
        ("entry_sum", "<u8"),
    ]
)
EMPTY_ENTRY = bytes(ENTRY_BYTES)


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """What an index file belongs to and how its segments are cut.

    Attributes:
        namespace: the namespace's digest.
        rank: the rank that writes here.
        record_bytes: largest payload.
        slot_bytes: distance of two payloads in a segment, whole pages.
        slots_per_segment: slots of every segment but possibly the last.
    """

    namespace: bytes
    rank: int
    record_bytes: int
    slot_bytes: int
    slots_per_segment: int

    @property
    def seed(self) -> int:
        """Seed of all checksums of this rank's records."""
        return xxhash.xxh3_64_intdigest(self.namespace + struct.pack("<I", self.rank))

    def encode(self) -> bytes:
        """The identity part of the header page."""
        data = _IDENTITY.pack(
            _MAGIC,
            VERSION,
            self.rank,
            self.namespace,
            self.slots_per_segment,
            0,
            self.slot_bytes,
            self.record_bytes,
        )
        return data + _U64.pack(xxhash.xxh3_64_intdigest(data))

    @classmethod
    def decode(cls, page: bytes) -> IndexIdentity | None:
        """The identity in a header page; None if it is torn, foreign or of another version."""
        if len(page) < HEADER_BYTES:
            return None
        data = page[: _IDENTITY.size]
        magic, version, rank, namespace, slots, _, slot_bytes, record_bytes = _IDENTITY.unpack(data)
        (checksum,) = _U64.unpack_from(page, _IDENTITY.size)
        if magic != _MAGIC or version != VERSION or checksum != xxhash.xxh3_64_intdigest(data):
            return None
        return cls(namespace, rank, record_bytes, slot_bytes, slots)


@dataclass(frozen=True, slots=True)
class Record:
    """One stored record as the index knows it."""

    digest: bytes
    slot: int
    length: int
    payload_sum: int
    stamp: int

    def encode(self, seed: int) -> bytes:
        """The record's entry."""
        data = _ENTRY.pack(_ENTRY_MAGIC, self.length, self.stamp, self.digest, self.payload_sum)
        return data + _U64.pack(xxhash.xxh3_64_intdigest(data, seed))


def decode_entry(data: bytes | memoryview, slot: int, seed: int) -> Record | None:
    """The record in an entry of 64 bytes; None for an empty, torn or foreign one."""
    magic, length, stamp, digest, payload_sum = _ENTRY.unpack_from(data)
    if magic != _ENTRY_MAGIC:
        return None
    (checksum,) = _U64.unpack_from(data, _ENTRY.size)
    if checksum != xxhash.xxh3_64_intdigest(data[: _ENTRY.size], seed):
        return None
    return Record(digest, slot, length, payload_sum, stamp)


def decode_entries(table: bytes, first_slot: int, seed: int) -> list[Record]:
    """All valid records of consecutive entries."""
    view = memoryview(table)
    return [
        record
        for row in np.flatnonzero(entry_array(table)["magic"] == _ENTRY_MAGIC).tolist()
        if (record := decode_entry(view[row * ENTRY_BYTES : (row + 1) * ENTRY_BYTES], first_slot + row, seed))
    ]


def entry_array(table: bytes) -> npt.NDArray[np.void]:
    """Entries as a structured array; bytes past the last whole entry are ignored."""
    return np.frombuffer(table, ENTRY_DTYPE, count=len(table) // ENTRY_BYTES)


def entry_offset(slot: int) -> int:
    """Where a slot's entry lies in the index file."""
    return HEADER_BYTES + slot * ENTRY_BYTES


def slot_bytes_for(record_bytes: int) -> int:
    """Distance of two payloads: whole pages, so that records never share one."""
    return -(-record_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_checksum(view: memoryview | bytes, seed: int) -> int:
    """xxh3_64 of a payload. Releases the interpreter's lock on large ones."""
    return xxhash.xxh3_64_intdigest(view, seed)


def segment_name(segment: int) -> str:
    """File name of a segment."""
    return f"segment-{segment:05d}"
