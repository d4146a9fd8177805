"""Errors of fastkv: one class per remedy.

Every message says what was given, what is allowed and what to do. All classes derive from FastKVError, so that a
command line catches one type and prints its text without a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class FastKVError(Exception):
    """Base of everything that fastkv raises on purpose."""


class ConfigError(FastKVError, ValueError):
    """The configuration, a model file or a scales file does not fit; the user fixes it before starting again."""


class RequestError(FastKVError, ValueError):
    """One request cannot be served as given (empty, too long, unknown id); the caller fixes that request."""


class OutOfBlocksError(FastKVError):
    """Too few blocks are free or evictable; wait for a release, evict, or preempt a request."""

    def __init__(self, requested: int, available: int, num_blocks: int, level: str = "device") -> None:
        super().__init__(
            f"{requested} {level} blocks were requested, {available} of {num_blocks} are free or evictable; "
            "wait for a request to finish, preempt one, or configure more blocks"
        )
        self.requested, self.available, self.num_blocks, self.level = requested, available, num_blocks, level


class _MovementError(FastKVError):
    def __init__(
        self, message: str, *, level: str = "", block_ids: Sequence[int] = (), layer: int | None = None
    ) -> None:
        where = [f"blocks {list(block_ids)} of level {level}"] if block_ids else []
        if layer is not None:
            where.append(f"layer {layer}")
        super().__init__(message + (f" [{', '.join(where)}]" if where else ""))
        self.level, self.block_ids, self.layer = level, tuple(block_ids), layer


class TransferError(_MovementError):
    """A copy between device and host failed; the step that relied on it is discarded and recomputed."""


class StorageError(_MovementError):
    """A storage backend failed; the records count as a miss and the operation may be retried."""


class WorkerError(FastKVError):
    """A worker process died or answered with an error; its requests are lost, start the engine again."""


class InvariantError(FastKVError):
    """An internal invariant does not hold: a bug of fastkv, please report it with the message."""
