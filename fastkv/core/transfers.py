"""TransferPlan: which blocks move between two levels, and in which order. What a worker answers is a TransferAck.

Made by the scheduler's tiers, carried by messages (core/messages.py), carried out by the worker's copy engine on every
rank. Plain values only: ids and digests as bytes.

    plan = stage, stage, ...      stages run one after another, so a later one may reuse a block of an earlier one
    stage = copy, copy, ...       copies of one stage run in any order

Always holds for a plan that `check_plan` passed: a stage joins two neighbouring levels, has as many sources as
destinations, and writes no destination twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from fastkv.core.digest import DIGEST_BYTES
from fastkv.core.spec import Level
from fastkv.errors import InvariantError

_NEIGHBOURS = {
    (Level.DEVICE, Level.HOST),
    (Level.HOST, Level.DEVICE),
    (Level.HOST, Level.STORAGE),
    (Level.STORAGE, Level.HOST),
}

Ids = npt.NDArray[np.int32]


class TransferStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies between two neighbouring levels.

    Attributes:
        source, destination: levels.
        source_ids, destination_ids: int32 block ids at each side, as bytes; empty at the side that is STORAGE.
        digests: prefix digests one after another, in token order, when a side is STORAGE; else empty.
    """

    source: Level
    destination: Level
    source_ids: bytes = b""
    destination_ids: bytes = b""
    digests: bytes = b""

    @property
    def num_blocks(self) -> int:
        """How many blocks move."""
        return len(self.destination_ids if self.source is Level.STORAGE else self.source_ids) // 4

    @property
    def touches_storage(self) -> bool:
        """Whether a side is STORAGE."""
        return Level.STORAGE in (self.source, self.destination)

    def ids(self, level: Level) -> Ids:
        """Block ids at one of the stage's two levels, read-only. Empty for STORAGE."""
        return np.frombuffer(self.source_ids if level is self.source else self.destination_ids, dtype="<i4")

    def digest_list(self) -> list[bytes]:
        """The digests, one by one."""
        return [self.digests[i : i + DIGEST_BYTES] for i in range(0, len(self.digests), DIGEST_BYTES)]


class TransferPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages to carry out in order. plan_id comes from the scheduler; acknowledgements repeat it."""

    plan_id: int
    stages: tuple[TransferStage, ...]

    @property
    def is_load(self) -> bool:
        """Whether it brings blocks to the device: a step waits for it."""
        return any(stage.destination is Level.DEVICE for stage in self.stages)


class TransferFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why and where a plan failed on one rank.

    Attributes:
        stage: index of the stage that failed; earlier ones are complete.
        source, destination: its levels.
        block_ids: ids at its block side (DEVICE or HOST) that are not known to be complete.
        layer: layer that was being copied; -1 when it is not one layer's failure.
        cause: the error's text.
    """

    stage: int
    source: Level
    destination: Level
    block_ids: tuple[int, ...]
    layer: int
    cause: str


class TransferAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank is done with a plan: nothing reads from or writes to its blocks any more.

    Attributes:
        plan_id: the plan.
        rank: the rank.
        failure: None when every stage is complete.
        landed: for a plan whose last stage touches storage, one byte a block: 1 if it was stored or read, 0 if not (a
            miss, a full or slow backend: no failure). Else empty.
    """

    plan_id: int
    rank: int
    failure: TransferFailure | None = None
    landed: bytes = b""


def stage_of(
    source: Level,
    destination: Level,
    source_ids: npt.ArrayLike = (),
    destination_ids: npt.ArrayLike = (),
    digests: Sequence[bytes] = (),
) -> TransferStage:
    """A stage from arrays of ids and a list of digests."""
    ids = [np.ascontiguousarray(row, dtype="<i4").tobytes() for row in (source_ids, destination_ids)]
    return TransferStage(source, destination, ids[0], ids[1], b"".join(digests))


def check_plan(plan: TransferPlan, num_device_blocks: int, num_host_blocks: int) -> None:
    """Refuse a plan that cannot be carried out here; nothing was done yet.

    Raises:
        InvariantError: no stage, levels that are no neighbours, unequal lengths, an id out of range, a destination
            that is written twice.
    """
    limits = {Level.DEVICE: num_device_blocks, Level.HOST: num_host_blocks}
    if not plan.stages:
        raise InvariantError(f"transfer plan {plan.plan_id} has no stage")
    for index, stage in enumerate(plan.stages):
        where = f"transfer plan {plan.plan_id}, stage {index}"
        if (stage.source, stage.destination) not in _NEIGHBOURS:
            raise InvariantError(f"{where}: {stage.source.name} to {stage.destination.name} are no neighbours")
        for level in (stage.source, stage.destination):
            if level is Level.STORAGE:
                if len(stage.digests) != stage.num_blocks * DIGEST_BYTES or stage.ids(level).size:
                    raise InvariantError(f"{where}: {stage.num_blocks} blocks need as many digests and no storage ids")
                continue
            ids = stage.ids(level)
            if not len(ids) or len(ids) != stage.num_blocks:
                raise InvariantError(f"{where}: {len(ids)} {level.name} ids for {stage.num_blocks} blocks")
            if int(ids.min()) < 0 or int(ids.max()) >= limits[level]:
                raise InvariantError(f"{where}: {level.name} ids {ids.tolist()} must lie in [0, {limits[level]})")
            if level is stage.destination and len(set(ids.tolist())) != len(ids):
                raise InvariantError(f"{where}: {level.name} ids {ids.tolist()} name a destination twice")
