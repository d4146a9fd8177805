"""Block ids of one level: which are handed out, which are free.

Owns ids, never memory. The CacheManager keeps such pools natively (custom_ops/core/block_pool.h explains the layout);
these classes are the same code by itself, for other users of paged memory and for tests. A block is

    FREE --allocate--> handed out --free--> FREE            after a shrink, a block past the end vanishes when freed

Always holds: num_free + handed out = num_blocks + num_draining; a call that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fastkv.errors import RequestError
from fastkv.scheduler._native import core


class BlockPool:
    """Free ids of one level; allocate and free are O(1) a block."""

    level = "device"
    _native_level = 0

    def __init__(self, num_blocks: int) -> None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or not 0 <= num_blocks < 2**31:
            raise RequestError(f"{self.level} num_blocks {num_blocks!r} must be an integer in [0, 2**31)")
        self.native = core.BlockPool(num_blocks, self._native_level)

    @property
    def num_blocks(self) -> int:
        """How many ids there are."""
        return self.native.num_blocks

    @property
    def num_free(self) -> int:
        """How many of them nobody has."""
        return self.native.num_free

    @property
    def num_draining(self) -> int:
        """Blocks past the end of a shrunk pool that are still handed out."""
        return self.native.num_draining

    def is_free(self, block_id: int) -> bool:
        """Whether the id exists and nobody has it."""
        return 0 <= block_id < self.num_blocks and not self.native.is_used(block_id)

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        """Hand out count ids, int32, all or nothing; 0 is legal and gives none.

        Raises:
            RequestError: count is negative.
            OutOfBlocksError: fewer are free.
        """
        return self.native.allocate(count)

    def free(self, block_ids: Iterable[int]) -> None:
        """Take ids back, all or nothing.

        Raises:
            RequestError: an id out of range, free already, or twice in this call.
        """
        self.native.free([int(block_id) for block_id in block_ids])

    def resize(self, num_blocks: int) -> int:
        """Change the number of ids; ids past the end that are handed out drain. Returns how many those are."""
        if not 0 <= num_blocks < 2**31:
            raise RequestError(f"{self.level} num_blocks {num_blocks} must be in [0, 2**31)")
        self.native.resize(num_blocks)
        return self.native.num_draining

    def check_integrity(self) -> None:
        """Recompute the free set. Raises InvariantError when it does not fit."""
        self.native.check()


class DeviceBlockPool(BlockPool):
    """Blocks that attention reads."""


class HostBlockPool(BlockPool):
    """Block records in host memory."""

    level = "host"
    _native_level = 1
