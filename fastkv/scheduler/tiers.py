"""TierManager: plans which blocks move between device, host and storage, and keeps the books about plans under way.

Works on top of the CacheManager, which owns blocks and holds; the native core (custom_ops/core/transfers.h) keeps both
ends of a copy out of everybody's reach until the plan is over. Called by the engine's batcher; never touches memory.

    what happens              what is planned
    a prompt waits            fetch: blocks that storage has and nobody faster, to the host
    a request starts          load: blocks that match found on the host, into the request's own blocks; its first step
                              waits for them layer by layer
    blocks are published      offload, by write policy: at once, or when they were found often enough
    room is short             write_back: the blocks that would be evicted next are offloaded first, then evicted
    an offload has landed     store: written behind

An offload under write_back is a plan of its own and the eviction follows its acknowledgement: a failed copy then costs
nothing, on any number of ranks, where an eviction in the same plan would have lost the block on those that went on.

Always holds: a block is findable at a level only after every rank acknowledged it there; a failed plan leaves the books
as if it had not been asked; blocks of a plan that nobody acknowledges stay out of use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeAlias

import numpy as np

from fastkv.core.spec import Level
from fastkv.core.transfers import TransferAck, TransferPlan, TransferStage, stage_of
from fastkv.errors import RequestError
from fastkv.scheduler.flights import Flight, FlightBoard, FlightKind
from fastkv.scheduler.manager import CacheManager
from fastkv.scheduler.tier_options import TierOptions, WritePolicy


class PrefixLookup(Protocol):
    """What is asked of storage: how many leading blocks exist for every rank, answered by the deadline."""

    def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
        """deadline_s is an instant of time.monotonic()."""
        ...


@dataclass(slots=True)
class TierStats:
    """Blocks that moved, counted when every rank has acknowledged, and what did not work."""

    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    fetched_blocks: int = 0
    missed_blocks: int = 0  # storage said it had them, and did not give them
    failed_plans: int = 0
    last_cause: str = ""


_Begun: TypeAlias = "tuple[int, np.ndarray, np.ndarray] | None"


class TierManager:
    """The tiers below one CacheManager's device pool.

    Args:
        manager: the blocks; made with num_host_blocks > 0, or nothing ever moves.
        options: how.
        lookup: storage's scheduler half; None without storage.
        clock: seconds; what deadlines are compared with.
    """

    def __init__(
        self,
        manager: CacheManager,
        options: TierOptions | None = None,
        lookup: PrefixLookup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.options = options or TierOptions()
        self.stats = TierStats()
        self._lookup = lookup
        self._clock = clock
        self._board = FlightBoard(self.options.num_ranks)
        self._plan_ids = count(1)
        self._offloads: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._outgoing: list[TransferPlan] = []
        self._loads: dict[int, bool | None] = {}
        self._fetches: dict[str, int] = {}  # waiting request -> the plan that it waits for
        self._joined: set[str] = set()  # those that wait for another request's plan
        self._arriving: dict[bytes, int] = {}  # digest -> the plan that fetches it
        self._no_write_back_before_s = 0.0
        self._num_host_blocks: int = manager._counts(int(Level.HOST))[0]
        self._is_enabled = self._num_host_blocks > 0

    # -- what the batcher asks for ------------------------------------------------------------------------------

    def fetch(self, request_id: str) -> bool:
        """Bring what storage has of a waiting request to the host.

        Returns:
            Whether blocks are on their way: do not start the request while `is_fetching` says so.

        Raises:
            RequestError: unknown id.
        """
        if self._lookup is None or not self._is_enabled:
            return False
        known = self.manager._cached_blocks(request_id)
        most = (self.manager.num_tokens(request_id) - 1) // self.manager.block_size
        digests = self.manager.prefix_digests(request_id, most)[known:]
        if not digests:
            return False
        if digests[0] in self._arriving:  # for another request: ask again when it is here
            self._fetches[request_id] = self._arriving[digests[0]]
            self._joined.add(request_id)
            return True
        stored = self._lookup.contains(digests, time.monotonic() + self.options.lookup_timeout_s)
        begun: _Begun = self.manager._begin_fetch(request_id, known, stored) if stored else None
        if begun is None:
            return False
        transfer, _, host = begun
        digests = digests[: len(host)]
        stage = stage_of(Level.STORAGE, Level.HOST, destination_ids=host, digests=digests)
        plan = self._send(FlightKind.FETCH, [stage], [(transfer, len(host))], self.options.fetch_timeout_s)
        self._arriving.update(dict.fromkeys(digests, plan.plan_id))
        self._fetches[request_id] = plan.plan_id
        return True

    def is_fetching(self, request_id: str) -> bool:
        """Whether blocks of the request are still on their way from storage, and worth waiting for."""
        flight = self._board.get(self._fetches.get(request_id, 0))
        if flight is not None and not flight.cause:
            return True
        is_joined = request_id in self._joined
        self.forget(request_id)
        return is_joined and flight is None and self.fetch(request_id)

    def forget(self, request_id: str) -> None:
        """The request waits no more: it starts, or was aborted."""
        self._fetches.pop(request_id, None)
        self._joined.discard(request_id)

    def load(self, request_ids: Sequence[str]) -> int | None:
        """Bring what match found on the host into the requests' own blocks, in one plan.

        Args:
            request_ids: matched, with blocks allocated for what was found. Those without host blocks are left out.

        Returns:
            The plan's id, for the step that reads the blocks and for `take_load`; None when there is nothing to load.
            Until the load is over, publish refuses the requests.

        Raises:
            RequestError: an unknown id, too few blocks, or a load under way; nothing was begun.
        """
        moves: list[tuple[int, np.ndarray, np.ndarray]] = []
        try:
            for request_id in request_ids:
                move: _Begun = self.manager._begin_load(request_id)
                if move is not None:
                    moves.append(move)
        except RequestError:
            for transfer, device, _ in moves:  # nothing was sent, so nothing can fail: as if they had not been asked
                self.manager._end_transfer(transfer, len(device), False)
            raise
        if not moves:
            return None
        host, device = (np.concatenate([move[side] for move in moves]) for side in (2, 1))
        stage = stage_of(Level.HOST, Level.DEVICE, host, device)
        transfers = [(move[0], len(move[1])) for move in moves]
        plan = self._send(FlightKind.LOAD, [stage], transfers, self.options.transfer_timeout_s)
        self._loads[plan.plan_id] = None
        return plan.plan_id

    def has_landed(self, plan_id: int) -> bool:
        """Whether a load is over and every rank has its blocks. Not so after its step: discard the step."""
        return bool(self._loads.get(plan_id))

    def take_load(self, plan_id: int) -> bool:
        """As has_landed, once: the load's step is over, and nobody asks again."""
        return bool(self._loads.pop(plan_id, False))

    def written(self, request_id: str) -> None:
        """Call after publish and before release: offload what the write policy says, with the next plans."""
        policy = self.options.write_policy
        if not self._is_enabled or policy is WritePolicy.WRITE_BACK:
            return
        is_selective = policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        begun: _Begun = self.manager._begin_offload(
            request_id, self.options.write_through_threshold if is_selective else 0
        )
        if begun is not None:
            self._offloads.append(begun)

    def make_room(self, num_blocks: int) -> bool:
        """Ask before allocating num_blocks: False while blocks that would be evicted are still being written back.

        Then allocate nothing and ask again after the next acknowledgements. Nothing is promised by True: allocation
        may still find too few blocks.
        """
        shortfall = num_blocks - self.manager._counts(int(Level.DEVICE))[1]
        if (
            shortfall <= 0
            or not self._is_enabled
            or self.options.write_policy is not WritePolicy.WRITE_BACK
            or self._clock() < self._no_write_back_before_s
        ):
            return True
        under_way = self._num_writing_back()
        if under_way < shortfall:
            begun: _Begun = self.manager._begin_write_back(shortfall - under_way)
            if begun is not None:
                self._offloads.append(begun)
                under_way += len(begun[1])
        return under_way == 0

    # -- plans and acknowledgements -----------------------------------------------------------------------------

    def take_plans(self) -> tuple[TransferPlan, ...]:
        """Plans to send to every rank now, each once."""
        if self._offloads:
            device, host = (np.concatenate([move[side] for move in self._offloads]) for side in (1, 2))
            stage = stage_of(Level.DEVICE, Level.HOST, device, host)
            transfers = [(move[0], len(move[1])) for move in self._offloads]
            self._offloads = []
            self._send(FlightKind.OFFLOAD, [stage], transfers, self.options.transfer_timeout_s)
        outgoing, self._outgoing = self._outgoing, []
        return tuple(outgoing)

    def acknowledge(self, acks: Sequence[TransferAck]) -> None:
        """Take what ranks say about plans.

        Raises:
            InvariantError: an acknowledgement of a plan that does not wait for it.
        """
        for ack in acks:
            flight = self._board.acknowledge(ack)
            if flight is not None:
                self._land(flight)

    def expire(self) -> None:
        """Give up plans that passed their deadline. Their blocks stay in use until the ranks acknowledge."""
        for flight in self._board.expire(self._clock()):
            self._note_failure(flight)

    def lose_rank(self, rank: int) -> None:
        """A rank's process is gone: whatever waited for it has failed."""
        for flight in self._board.lose_rank(rank):
            self._land(flight)

    @property
    def num_under_way(self) -> int:
        """Plans that are not over or not sent yet."""
        return len(self._board) + bool(self._offloads)

    @property
    def num_hopeful(self) -> int:
        """Those of them that have not failed."""
        return sum(not flight.cause for flight in self._board) + bool(self._offloads)

    @property
    def has_plans(self) -> bool:
        """Whether take_plans would give any."""
        return bool(self._offloads or self._outgoing)

    # -- the cache as a whole -----------------------------------------------------------------------------------

    def set_weights_version(self, version: str) -> None:
        """The weights changed: nothing older is found at any level, and what is under way re-inserts nothing.

        Storage is not asked any more until `use_lookup` says how it is under that version.

        Raises:
            RequestError: the version is no non-empty str; nothing was changed.
        """
        self.manager.set_weights_version(version)
        self._lookup = None
        unsent, self._outgoing = self._outgoing, []
        for plan in unsent:
            self._land(self._board.cancel(plan.plan_id, "the weights changed"))
        for transfer, _, _ in self._offloads:
            self.manager._end_transfer(transfer, 0, False)
        self._offloads = []

    def use_lookup(self, lookup: PrefixLookup | None) -> None:
        """Ask this half of storage from now on; None: nothing is fetched."""
        self._lookup = lookup

    def forget_device(self, *, host_too: bool = False) -> None:
        """The device cache's contents are gone (sleep), and with host_too the host's.

        Raises:
            RequestError: requests or copies hold blocks; nothing was forgotten.
        """
        if self.num_under_way:
            raise RequestError(f"{self.num_under_way} transfers are under way; wait for them first")
        self.manager._forget_level(int(Level.DEVICE))
        if host_too:
            self.manager._forget_level(int(Level.HOST))

    # -- inside -------------------------------------------------------------------------------------------------

    def _send(
        self, kind: FlightKind, stages: list[TransferStage], transfers: list[tuple[int, int]], timeout_s: float
    ) -> TransferPlan:
        plan = TransferPlan(next(self._plan_ids), tuple(stages))
        self._board.add(plan, kind, transfers, self._clock() + timeout_s)
        self._outgoing.append(plan)
        return plan

    def _land(self, flight: Flight) -> None:
        """A flight is over: its blocks go where they belong, or back."""
        if flight.cause:
            self._note_failure(flight)
        stores: list[tuple[int, np.ndarray]] = []
        start = num_landed = 0
        may_store = self.options.has_storage and flight.kind is FlightKind.OFFLOAD and self._has_room_to_store()
        for transfer, num_blocks in flight.transfers:
            landed = flight.leading(start, num_blocks)
            begun: _Begun = self.manager._end_transfer(transfer, landed, may_store and landed > 0)
            if begun is not None:
                stores.append((begun[0], begun[2]))
            start += num_blocks
            num_landed += landed
        if flight.kind is FlightKind.FETCH:
            for digest in flight.plan.stages[0].digest_list():
                self._arriving.pop(digest, None)
        self._count(flight, num_landed)
        if flight.plan.plan_id in self._loads:
            self._loads[flight.plan.plan_id] = not flight.cause
        if stores:
            host = np.concatenate([ids for _, ids in stores])
            digests = [digest for transfer, _ in stores for digest in self.manager._transfer_digests(transfer)]
            stage = stage_of(Level.HOST, Level.STORAGE, host, digests=digests)
            transfers = [(transfer, len(ids)) for transfer, ids in stores]
            self._send(FlightKind.STORE, [stage], transfers, self.options.store_timeout_s)

    def _count(self, flight: Flight, num_landed: int) -> None:
        stats = self.stats
        if flight.kind is FlightKind.OFFLOAD:
            stats.offloaded_blocks += num_landed
        elif flight.kind is FlightKind.LOAD:
            stats.loaded_blocks += num_landed
        elif flight.kind is FlightKind.FETCH:
            stats.fetched_blocks += num_landed
            stats.missed_blocks += flight.num_blocks - num_landed
        elif not flight.cause:
            stats.stored_blocks += sum(flight.landed)

    def _note_failure(self, flight: Flight) -> None:
        """Count a failure once: when it passes its deadline, or else when it is over."""
        if flight.is_noted:
            return
        flight.is_noted = True
        self.stats.failed_plans += 1
        self.stats.last_cause = f"{flight.kind.value}: {flight.cause}"
        if flight.kind is FlightKind.OFFLOAD:
            self._no_write_back_before_s = self._clock() + self.options.retry_after_s

    def _num_writing_back(self) -> int:
        sent = sum(f.num_blocks for f in self._board if f.kind is FlightKind.OFFLOAD and not f.cause)
        return sent + sum(len(move[1]) for move in self._offloads)

    def _has_room_to_store(self) -> bool:
        """Blocks that are being written behind cannot be evicted from the host: half of it at most is given to that."""
        writing = sum(flight.num_blocks for flight in self._board if flight.kind is FlightKind.STORE)
        return writing * 2 <= self._num_host_blocks
