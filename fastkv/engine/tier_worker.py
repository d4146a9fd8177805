"""TierWorker: one rank's answers to messages about the levels below the device. No model.

Wraps a CacheController; part of the ModelWorker, and a rank by itself where only blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastkv.core.messages import Done, Poll, PollResult, SetWeightsVersion, Sleep, Wake
from fastkv.core.spec import Level
from fastkv.core.transfers import TransferAck, TransferFailure, TransferPlan
from fastkv.errors import FastKVError, StorageError
from fastkv.worker.controller import CacheController
from fastkv.worker.ticket import Ticket, error_of


class TierWorker:
    """Starts plans, waits for loads, collects acknowledgements.

    Args:
        controller: the caches; allocated, with storage attached if there is any.
    """

    def __init__(self, controller: CacheController) -> None:
        self.controller = controller
        self._refused: list[TransferAck] = []

    def start(self, plans: Sequence[TransferPlan], loads: Sequence[int] = ()) -> list[Ticket]:
        """Start plans; tickets of those whose ids are in loads. A plan that cannot be carried out here has failed."""
        tickets = [self._start(plan) for plan in plans]
        return [ticket for ticket in tickets if ticket.plan.plan_id in loads]

    def _start(self, plan: TransferPlan) -> Ticket:
        try:
            return self.controller.submit(plan)
        except FastKVError as error:  # whoever planned it waits for an answer to each plan
            stage = plan.stages[0] if plan.stages else None
            source, destination = (stage.source, stage.destination) if stage else (Level.DEVICE, Level.HOST)
            ticket = Ticket(plan, self.controller.rank, sum(group.num_layers for group in self.controller.spec.groups))
            failure = TransferFailure(0, source, destination, (), -1, f"{type(error).__name__}: {error}")
            self._refused.append(ticket.finish(failure))
            return ticket

    def wait_for(self, loads: Sequence[Ticket]) -> None:
        """Return when all of these have landed in every layer.

        Raises:
            TransferError: one failed, or stalls past cache.transfer_timeout_s.
        """
        for ticket in loads:
            ack = ticket.wait(self.controller.config.cache.transfer_timeout_s)
            if ack.failure is not None:
                raise error_of(ack)

    def acks(self, wait_s: float = 0.0) -> tuple[TransferAck, ...]:
        """Acknowledgements since the last call; waits up to wait_s for the first."""
        refused, self._refused = self._refused, []
        return (*refused, *self.controller.take_acks(0.0 if refused else wait_s))

    def handle(self, message: Poll | SetWeightsVersion | Sleep | Wake) -> PollResult | Done:
        """Carry out one message.

        Raises:
            FastKVError: it could not be carried out.
        """
        storage = self.controller.storage
        if isinstance(message, Poll):
            self.start(message.transfers)
            acks = self.acks(message.wait_s)
            counters, error = (storage.counters(), storage.last_error()) if storage else ({}, "")
            return PollResult(message.plan_id, acks, counters, error)
        if isinstance(message, Sleep):
            self.controller.sleep(release_host=message.release_host)
        elif isinstance(message, Wake):
            self.controller.wake()
        elif storage is not None:
            storage.set_weights_version(message.version)
        return Done(message.plan_id)

    def close(self) -> None:
        """Finish copies, store what is queued, free the caches. Legal again after an error.

        Raises:
            TransferError: copies do not end; the memory stays.
            StorageError: the backend is stuck in a call; what was queued is not stored.
        """
        storage = self.controller.storage
        try:
            self.controller.free_cache()
        finally:
            is_closed = storage is None or storage.close()
        if not is_closed:
            raise StorageError("the storage backend is stuck in a call; what was queued is not stored", level="STORAGE")
