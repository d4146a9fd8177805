"""Block ids of one level: which are handed out, which are free.

Owns ids, never memory. Called by the CacheManager only. A block is FREE or handed out:

    FREE --allocate--> handed out --free--> FREE

Whether a handed-out block is held or evictable is the prefix index's business. Always holds: ids are 0..num_blocks-1,
each is free exactly once or handed out exactly once; a call that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastkv.errors import InvariantError, OutOfBlocksError, RequestError


class BlockPool:
    """Free ids of one level; allocate and free are O(1) a block."""

    level = "any"

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 0:
            raise RequestError(f"{self.level} num_blocks {num_blocks!r} must be an integer >= 0")
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_blocks(self) -> int:
        """How many ids there are."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """How many of them nobody has."""
        return len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody has this id."""
        return 0 <= block_id < self._num_blocks and self._is_free[block_id]

    def allocate(self, count: int) -> list[int]:
        """Hand out count ids, all or nothing; 0 is legal and gives none.

        Raises:
            RequestError: count is negative.
            OutOfBlocksError: fewer are free.
        """
        if count < 0:
            raise RequestError(f"cannot allocate {count} {self.level} blocks; ask for 0 or more")
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free), self._num_blocks, self.level)
        ids = [self._free.pop() for _ in range(count)]
        for block_id in ids:
            self._is_free[block_id] = False
        return ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Take ids back, all or nothing.

        Raises:
            RequestError: an id out of range, free already, or twice in this call.
        """
        ids = list(block_ids)
        bad = [b for b in ids if not 0 <= b < self._num_blocks or self._is_free[b]]
        if bad or len(set(ids)) != len(ids):
            raise RequestError(
                f"cannot free {self.level} blocks {ids}: {bad or 'an id'} is out of range, free already or given "
                f"twice; free each allocated id of 0..{self._num_blocks - 1} once"
            )
        for block_id in ids:
            self._is_free[block_id] = True
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Recompute the free set. Raises InvariantError when it does not fit."""
        if sorted(self._free) != [b for b in range(self._num_blocks) if self._is_free[b]]:
            raise InvariantError(f"{self.level} free list and free flags differ")


class DeviceBlockPool(BlockPool):
    """Blocks that attention reads."""

    level = "device"


class HostBlockPool(BlockPool):
    """Block records in host memory."""

    level = "host"
