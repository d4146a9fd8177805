"""PutBatch: one put on its way through FileConnector: reserved, written, committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastkv.storage.base import PutOutcome
from fastkv.storage.format import Record


@dataclass(slots=True, eq=False)
class PendingWrite:
    """One record on its way into a reserved slot.

    Attributes:
        row: its place in the batch.
        digest, view: the record.
        slot: where it goes.
        checksum: of the payload, once that is written.
    """

    row: int
    digest: bytes
    slot: int
    view: memoryview
    checksum: int = 0


@dataclass(slots=True)
class PutBatch:
    """State of a put.

    Attributes:
        outcomes: known so far, by row.
        writes: payloads to write.
        pinned: records that exist already and must stay until the batch ends.
    """

    outcomes: dict[int, PutOutcome] = field(default_factory=dict)
    writes: list[PendingWrite] = field(default_factory=list)
    pinned: list[Record] = field(default_factory=list)
