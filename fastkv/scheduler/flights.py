"""Flights: transfer plans that were sent to the ranks and are not over.

Owned by TierManager. A plan is over when every rank has acknowledged it; until then its blocks are in use, whatever was
decided about it meanwhile:

    under way --every rank: done--> over, done
        |------ a rank failed ----> failed --every rank has acknowledged--> over, failed
        '------ past deadline ----> failed --the late ranks acknowledge---> over, failed

A rank that is lost (its process died) acknowledges nothing any more, and touches nothing: it counts as a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from fastkv.core.transfers import TransferAck, TransferPlan
from fastkv.errors import InvariantError


class FlightKind(str, Enum):
    """What a plan is for."""

    OFFLOAD = "offload"  # device to host
    LOAD = "load"  # host to device
    STORE = "store"  # host to storage
    FETCH = "fetch"  # storage to host


@dataclass(slots=True, eq=False)
class Flight:
    """A plan under way.

    Attributes:
        plan: what was sent.
        kind: what for.
        transfers: the manager's transfers that it carries, each with its number of blocks, in the plan's order.
        deadline_s: on the tiers' clock; after that it counts as failed.
        waiting: ranks that have not acknowledged.
        landed: of a FETCH or STORE: one flag a block, set while every rank so far has it.
        cause: why it failed; "" while it has not.
        is_noted: the failure is counted.
    """

    plan: TransferPlan
    kind: FlightKind
    transfers: list[tuple[int, int]]
    deadline_s: float
    waiting: set[int]
    landed: list[bool] = field(default_factory=list)
    cause: str = ""
    is_noted: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks that the plan moves."""
        return sum(count for _, count in self.transfers)

    def leading(self, start: int, count: int) -> int:
        """How many leading blocks of [start, start + count) landed on every rank."""
        if self.cause:
            return 0
        row = self.landed[start : start + count]
        return row.index(False) if False in row else len(row)


class FlightBoard:
    """All plans under way, and who still has to acknowledge which.

    Args:
        num_ranks: ranks that carry out every plan.
    """

    def __init__(self, num_ranks: int) -> None:
        self._ranks = set(range(num_ranks))
        self._flights: dict[int, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, plan_id: int) -> Flight | None:
        """The flight of a plan, or None when it is over."""
        return self._flights.get(plan_id)

    def add(self, plan: TransferPlan, kind: FlightKind, transfers: list[tuple[int, int]], deadline_s: float) -> Flight:
        """A plan starts on every rank that is left."""
        flight = Flight(plan, kind, transfers, deadline_s, set(self._ranks))
        flight.landed = [True] * flight.num_blocks
        self._flights[plan.plan_id] = flight
        return flight

    def acknowledge(self, ack: TransferAck) -> Flight | None:
        """Take one rank's acknowledgement.

        Returns:
            The flight, if that was the last one; it is forgotten here.

        Raises:
            InvariantError: no such plan is under way, or that rank has acknowledged it. Nothing was changed.
        """
        flight = self._flights.get(ack.plan_id)
        if flight is None or ack.rank not in flight.waiting:
            raise InvariantError(f"rank {ack.rank} acknowledged plan {ack.plan_id}, which does not wait for it")
        if ack.landed and len(ack.landed) != flight.num_blocks:
            raise InvariantError(f"plan {ack.plan_id} has {flight.num_blocks} blocks, {len(ack.landed)} were answered")
        flight.waiting.discard(ack.rank)
        if ack.failure is not None:
            flight.cause = flight.cause or f"rank {ack.rank}: {ack.failure.cause}"
        elif ack.landed:
            flight.landed = [both and bool(one) for both, one in zip(flight.landed, ack.landed, strict=True)]
        return self._pop_if_over(flight)

    def expire(self, now_s: float) -> list[Flight]:
        """Flights that passed their deadline since the last call; they have failed, and are not over."""
        late = [flight for flight in self._flights.values() if not flight.cause and now_s >= flight.deadline_s]
        for flight in late:
            flight.cause = f"ranks {sorted(flight.waiting)} did not acknowledge in time"
        return late

    def cancel(self, plan_id: int, cause: str) -> Flight:
        """A plan that was never sent is over."""
        flight = self._flights.pop(plan_id)
        flight.waiting.clear()
        flight.cause = cause
        return flight

    def lose_rank(self, rank: int) -> list[Flight]:
        """A rank is gone. Returns the flights that are over because of it; all that waited for it have failed."""
        self._ranks.discard(rank)
        over = []
        for flight in list(self._flights.values()):
            if rank in flight.waiting:
                flight.waiting.discard(rank)
                flight.cause = flight.cause or f"rank {rank} is lost"
                if self._pop_if_over(flight):
                    over.append(flight)
        return over

    def _pop_if_over(self, flight: Flight) -> Flight | None:
        return None if flight.waiting else self._flights.pop(flight.plan.plan_id)
