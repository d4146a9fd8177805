"""CopyEngine: carries out transfer plans of one rank, beside the forward step.

Owned by the CacheController. One thread copies between device and host, one waits for storage; both are asleep while
there is nothing to do. Submitted plans may overtake each other, because the scheduler never lets two plans that are
not acknowledged share a block, except inside one plan, whose stages keep their order.

    submit --> loads ------.                     loads go first: a step waits for them
          '--> background --+--> copy thread ----> next stage, or the ticket's end
                                  ^     '--> storage lane --> storage thread --.
                                  '-------------- more stages -----------------'

A load is one copy that tells layer by layer what has landed, so that attention in layer l runs while l+1 moves.
Everything else is copied some blocks at a time, so that a load waits for one piece at most.

Always holds: a plan ends once, done or failed, and its acknowledgement is handed out once; a failed stage is the last;
after the end nobody touches the plan's blocks. Nothing is swallowed: what a copy raises is in the ticket.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from fastkv.core.spec import Level
from fastkv.core.transfers import Ids, TransferAck, TransferFailure, TransferPlan, TransferStage, check_plan
from fastkv.errors import TransferError
from fastkv.storage.base import PutOutcome
from fastkv.worker.records import BlockCopier, Direction
from fastkv.worker.storage_access import AnyStorageTicket, StorageAccess
from fastkv.worker.tensors import ByteArray
from fastkv.worker.ticket import Ticket

_PIECE_BYTES = 32 << 20  # of a copy that others may have to wait for: about 3 ms; pieces of 16 MiB cost 10 % more
_STORAGE_TICK_S = 0.002  # how late the end of a storage batch behind an unfinished one may be noticed


class _Run:
    """A plan under way: the stage it is in, and the pieces of that stage that are left."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.stage_index = 0
        self.pieces: Iterator[_Piece] | None = None
        self.num_landed = 0  # leading layers of the stage, if it loads

    @property
    def stage(self) -> TransferStage:
        return self.ticket.plan.stages[self.stage_index]

    @property
    def is_last_stage(self) -> bool:
        return self.stage_index == len(self.ticket.plan.stages) - 1

    def landed(self, num_layers: int) -> None:
        """Layers below num_layers have landed; readable, if no later stage brings anything to the device."""
        self.num_landed = num_layers
        later = self.ticket.plan.stages[self.stage_index + 1 :]
        if not any(stage.destination is Level.DEVICE for stage in later):
            self.ticket.advance(num_layers)


_Piece: TypeAlias = "tuple[Ids, Ids, range]"


class CopyEngine:
    """Executes plans on threads of its own.

    Args:
        copier: moves bytes between device and host.
        host: the host records, for storage; None without a host pool.
        num_device_blocks: blocks that plans may name.
        rank: whose acknowledgements these are.
        storage: access to storage; None: plans that name STORAGE are refused.
    """

    def __init__(
        self,
        copier: BlockCopier,
        host: ByteArray,
        num_device_blocks: int,
        rank: int,
        storage: StorageAccess | None = None,
    ) -> None:
        self._copier, self._host, self._num_device_blocks = copier, host, num_device_blocks
        self._layer_bytes = [copier.layer_bytes(layer) for layer in range(copier.num_layers)]
        self._rank = rank
        self._storage = storage
        self._changed = threading.Condition()
        self._loads: deque[_Run] = deque()
        self._background: deque[_Run] = deque()
        self._stored: list[tuple[_Run, AnyStorageTicket]] = []
        self._acks: list[TransferAck] = []
        self._num_unfinished = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=loop, name=f"fastkv-{name}-{rank}", daemon=True)
            for name, loop in (("copy", self._copy_loop), ("storage-wait", self._storage_loop))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_unfinished(self) -> int:
        """Plans under way."""
        with self._changed:
            return self._num_unfinished

    def submit(self, plan: TransferPlan) -> Ticket:
        """Start a plan.

        Raises:
            InvariantError: the plan cannot be carried out here (see check_plan).
            TransferError: the engine is closed, or the plan needs storage and there is none. Nothing was started.
        """
        if plan.stages and not plan.stages[0].touches_storage:
            self._copier.prepare(plan.stages[0].num_blocks)  # first: its thread wakes meanwhile
        check_plan(plan, self._num_device_blocks, len(self._host))
        if self._storage is None and any(stage.touches_storage for stage in plan.stages):
            raise TransferError(f"transfer plan {plan.plan_id} needs storage, and none is configured", level="STORAGE")
        run = _Run(Ticket(plan, self._rank, self._copier.num_layers))
        with self._changed:
            if self._is_closed:
                raise TransferError(f"transfer plan {plan.plan_id}: the copy engine is closed")
            self._num_unfinished += 1
        self._begin_stage(run)
        return run.ticket

    def take_acks(self, wait_s: float = 0.0) -> list[TransferAck]:
        """Acknowledgements of plans that ended since the last call, each handed out once.

        Args:
            wait_s: how long to wait for the first, if none is there and plans are under way.
        """
        with self._changed:
            if wait_s > 0 and self._num_unfinished:
                self._changed.wait_for(lambda: self._acks or not self._num_unfinished, wait_s)
            taken, self._acks = self._acks, []
            return taken

    def drain(self, timeout_s: float) -> bool:
        """Wait until no plan is under way; whether that came true in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_unfinished, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Take no more plans, finish those under way, end the threads. Legal twice.

        Returns:
            Whether everything ended. False: a copy or the backend is stuck; the memory must stay.
        """
        is_idle = self.drain(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads if is_idle else ():
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    # -- stages -------------------------------------------------------------------------------------------------

    def _begin_stage(self, run: _Run) -> None:
        """Hand the run's current stage to whoever carries it out."""
        stage = run.stage
        if stage.touches_storage:
            assert self._storage is not None
            try:
                ticket = self._storage.start(stage, self._host)
            except Exception as error:  # the caller may be a thread's top: it goes into the ticket
                self._fail(run, error)
                return
            with self._changed:
                self._stored.append((run, ticket))
                self._changed.notify_all()
            return
        run.pieces = self._split(run)
        with self._changed:
            self._queue_of(run).append(run)
            self._changed.notify_all()

    def _end_stage(self, run: _Run, landed: bytes = b"") -> None:
        if run.is_last_stage:
            self._finish(run, None, landed)
        else:
            run.stage_index += 1
            run.num_landed = 0
            self._begin_stage(run)

    def _fail(self, run: _Run, error: BaseException, layer: int = -1, block_ids: tuple[int, ...] | None = None) -> None:
        stage = run.stage
        side = Level.HOST if stage.destination is Level.STORAGE else stage.destination
        if block_ids is None:
            block_ids = tuple(stage.ids(side).tolist())
        cause = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        failure = TransferFailure(run.stage_index, stage.source, stage.destination, block_ids, layer, cause)
        self._finish(run, failure)

    def _finish(self, run: _Run, failure: TransferFailure | None, landed: bytes = b"") -> None:
        ack = run.ticket.finish(failure, landed)
        with self._changed:
            self._acks.append(ack)
            self._num_unfinished -= 1
            self._changed.notify_all()

    # -- device and host ----------------------------------------------------------------------------------------

    def _split(self, run: _Run) -> Iterator[_Piece]:
        """The stage's copies: one if it loads, some blocks at a time if not."""
        stage, layers = run.stage, range(self._copier.num_layers)
        device, host = stage.ids(Level.DEVICE), stage.ids(Level.HOST)
        if stage.destination is Level.DEVICE:
            yield device, host, layers
            return
        step = max(1, _PIECE_BYTES // sum(self._layer_bytes))
        for start in range(0, len(device), step):
            yield device[start : start + step], host[start : start + step], layers

    def _copy_loop(self) -> None:
        while (run := self._next_run()) is not None:
            ids: Ids | None = None
            is_load = run.stage.destination is Level.DEVICE
            try:
                assert run.pieces is not None
                piece = next(run.pieces, None)
                if piece is not None:
                    device, host, layers = piece
                    if is_load:
                        ids = device
                        self._copier.copy(Direction.TO_DEVICE, device, host, layers, run.landed)
                    else:
                        ids = host
                        self._copier.copy(Direction.TO_HOST, device, host, layers)
            except Exception as error:  # the top of a thread: it goes into the ticket
                self._fail(run, error, run.num_landed if is_load else -1, None if ids is None else tuple(ids.tolist()))
                continue
            if piece is None:
                self._end_stage(run)
            else:
                with self._changed:
                    self._queue_of(run).appendleft(run)

    def _queue_of(self, run: _Run) -> deque[_Run]:
        return self._loads if run.ticket.plan.is_load else self._background

    def _next_run(self) -> _Run | None:
        """The run that gets the next piece; None when the engine has closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._background or self._is_closed)
            if self._loads:
                return self._loads.popleft()
            return self._background.popleft() if self._background else None

    # -- storage ------------------------------------------------------------------------------------------------

    def _storage_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stored or self._is_closed)
                if not self._stored:
                    return
                under_way = list(self._stored)
            ended = [pair for pair in under_way if pair[1].is_settled]
            if not ended:
                under_way[0][1].wait_settled(time.monotonic() + _STORAGE_TICK_S)
                continue
            with self._changed:
                self._stored = [pair for pair in self._stored if pair not in ended]
            for run, ticket in ended:
                self._take_outcomes(run, ticket)

    def _take_outcomes(self, run: _Run, ticket: AnyStorageTicket) -> None:
        """A storage batch is settled: its buffers are free and its outcomes known."""
        is_put = run.stage.destination is Level.STORAGE
        landed = bytes(
            outcome.is_stored if isinstance(outcome, PutOutcome) else outcome.is_hit for outcome in ticket.wait()
        )
        if all(landed) or run.is_last_stage:
            self._end_stage(run, landed)
            return
        missing = [i for i, is_there in zip(run.stage.ids(Level.HOST).tolist(), landed, strict=True) if not is_there]
        what = "could not be stored" if is_put else "were not in storage"
        self._fail(run, TransferError(f"{len(missing)} records {what}"), block_ids=tuple(missing))
