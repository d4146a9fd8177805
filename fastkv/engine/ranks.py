"""RankGroup: the workers of all tensor-parallel ranks, which carry out the same transfer plans.

For engines with more than one rank. A plan is acknowledged when every rank has acknowledged it; a rank that fails,
stalls or dies fails it for all. The TierManager keeps that account; this class gets the messages across.

    rank:  alive --no answer in time--> late --its answer comes--> alive       late: asked nothing new meanwhile
             '-- its process ends, or it
                 met an unknown error ----> lost, for good: killed, so that no copy of it runs any more
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

from fastkv.core.messages import Poll, PollResult
from fastkv.core.transfers import TransferPlan
from fastkv.engine.transport import ProcessWorker
from fastkv.errors import FastKVError, InvariantError, WorkerError
from fastkv.scheduler.tiers import TierManager


class RankGroup:
    """Worker processes, one a rank.

    Args:
        workers: by rank.
        answer_timeout_s: how long a worker may take longer than it was told to wait; then it is late.
    """

    def __init__(self, workers: Sequence[ProcessWorker], answer_timeout_s: float = 1.0) -> None:
        self.workers = list(workers)
        self.lost: set[int] = set()
        self._answer_timeout_s = answer_timeout_s
        self._asked: dict[int, Poll] = {}  # ranks that owe an answer
        self._unsent: dict[int, list[TransferPlan]] = {rank: [] for rank in range(len(workers))}
        self._plan_ids = count(1)

    @property
    def late(self) -> set[int]:
        """Ranks that owe an answer."""
        return set(self._asked)

    def poll(self, tiers: TierManager, wait_s: float = 0.0) -> None:
        """Send what the tiers planned to every rank, and take what ranks acknowledge.

        Args:
            tiers: made for as many ranks as there are workers.
            wait_s: how long ranks may wait until something ended.

        Raises:
            FastKVError: a rank reported an error that is no transfer's.
        """
        plans = tiers.take_plans()
        for rank in self._unsent:
            if rank not in self.lost:
                self._unsent[rank] += plans
        for rank, worker in enumerate(self.workers):
            if rank in self.lost or rank in self._asked:
                continue
            message = Poll(next(self._plan_ids), tuple(self._unsent[rank]), wait_s)
            try:
                worker.send(message)
            except WorkerError:
                self._lose(rank, tiers)
                continue
            self._asked[rank], self._unsent[rank] = message, []
        end_s = time.monotonic() + wait_s + self._answer_timeout_s
        for rank in sorted(self._asked):
            self._receive(rank, tiers, end_s)
        tiers.expire()

    def settle(self, tiers: TierManager, timeout_s: float) -> bool:
        """Poll until no plan is under way; False if one still is after timeout_s."""
        end_s = time.monotonic() + timeout_s
        while tiers.num_under_way and time.monotonic() < end_s:
            self.poll(tiers, 0.02)
        return not tiers.num_under_way

    def close(self) -> None:
        """End all workers. Raises the first FastKVError that one of them meets, after all have ended."""
        errors = []
        for worker in self.workers:
            try:
                worker.close()
            except FastKVError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _receive(self, rank: int, tiers: TierManager, end_s: float) -> None:
        message = self._asked[rank]
        try:
            answer = self.workers[rank].receive(message, max(0.0, end_s - time.monotonic()))
        except WorkerError:
            self._lose(rank, tiers)
            return
        except FastKVError:
            del self._asked[rank]
            raise
        if answer is None:
            return
        del self._asked[rank]
        if not isinstance(answer, PollResult):
            raise InvariantError(f"rank {rank} answered a Poll with {answer!r}")
        tiers.acknowledge(answer.acks)

    def _lose(self, rank: int, tiers: TierManager) -> None:
        # A Python exception in a live worker is a WorkerError too, and its copies would go on in blocks that are free.
        self.workers[rank].kill()
        self.lost.add(rank)
        self._asked.pop(rank, None)
        self._unsent[rank] = []
        tiers.lose_rank(rank)
