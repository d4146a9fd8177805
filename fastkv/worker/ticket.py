"""Ticket: completion of one transfer plan on one rank.

Made by CopyEngine.submit, held by whoever waits: a step for the layers of its loads, the worker for acknowledgements.

    under way --layer by layer--> ... --last stage--> done
        '---------------- a copy failed --------------> failed (level, block ids, layer, cause)

Always holds: a layer that is_ready was is readable, its bytes have landed; once a ticket is done or failed, nothing
reads from or writes to the plan's blocks any more; what a ticket says never changes.
"""

from __future__ import annotations

import threading

from fastkv.core.transfers import TransferAck, TransferFailure, TransferPlan
from fastkv.errors import InvariantError, TransferError

NO_TIMEOUT = float("inf")


class Ticket:
    """A plan on its way.

    Args:
        plan: what is carried out.
        rank: by whom.
        num_layers: layers of a record.
    """

    def __init__(self, plan: TransferPlan, rank: int, num_layers: int) -> None:
        self.plan, self.rank, self.num_layers = plan, rank, num_layers
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # a layer is ready, or the plan is over
        self._over = threading.Condition(lock)  # whoever waits for the end is not woken for every layer
        self._ready_layers = 0
        self._ack: TransferAck | None = None

    def poll(self) -> TransferAck | None:
        """The acknowledgement, or None while the plan is under way. Never blocks."""
        with self._changed:
            return self._ack

    def wait(self, timeout_s: float = NO_TIMEOUT) -> TransferAck:
        """The acknowledgement, done or failed.

        Raises:
            TransferError: it is still under way after timeout_s.
        """
        with self._over:
            if not self._over.wait_for(lambda: self._ack is not None, _bounded(timeout_s)):
                raise self._stalled(timeout_s, None)
            assert self._ack is not None
            return self._ack

    def wait_for_layer(self, layer: int, timeout_s: float = NO_TIMEOUT) -> None:
        """Return when the plan's loads have landed in this layer (global id; MTP's follow the main model's).

        Raises:
            TransferError: the plan failed, with level, ids, layer and cause; or nothing landed within timeout_s.
            InvariantError: there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise InvariantError(f"layer {layer} is not one of the {self.num_layers} layers of a record")
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._ready_layers > layer or self._ack is not None, _bounded(timeout_s)
            )
            if not is_over:
                raise self._stalled(timeout_s, layer)
            if self._ack is not None and self._ack.failure is not None:
                raise error_of(self._ack)

    # For the engine.

    def advance(self, ready_layers: int) -> None:
        """Layers below ready_layers have landed."""
        with self._changed:
            self._ready_layers = ready_layers
            self._changed.notify_all()

    def finish(self, failure: TransferFailure | None = None, landed: bytes = b"") -> TransferAck:
        """The end, once."""
        with self._changed:
            assert self._ack is None
            self._ack = TransferAck(self.plan.plan_id, self.rank, failure, landed)
            self._changed.notify_all()
            self._over.notify_all()
            return self._ack

    def _stalled(self, timeout_s: float, layer: int | None) -> TransferError:
        last = self.plan.stages[-1]
        return TransferError(
            f"transfer plan {self.plan.plan_id} is still under way after {timeout_s:g} s",
            level=last.destination.name,
            block_ids=last.ids(last.destination).tolist(),
            layer=layer,
        )


def error_of(ack: TransferAck) -> TransferError:
    """The error that a failed acknowledgement tells of."""
    failure = ack.failure
    assert failure is not None
    return TransferError(
        f"transfer plan {ack.plan_id} failed on rank {ack.rank}, {failure.source.name} to {failure.destination.name}: "
        f"{failure.cause}",
        level=failure.destination.name,
        block_ids=failure.block_ids,
        layer=None if failure.layer < 0 else failure.layer,
    )


def _bounded(timeout_s: float) -> float:
    return min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
