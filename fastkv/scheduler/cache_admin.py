"""What concerns the cache as a whole, whichever request is served: pins, eviction, size, weights, events, counts.

The half of CacheManager (manager.py, whose header says what always holds) that belongs to no request's life. The native
side has it in custom_ops/core/manager_admin.cc.
"""

# mypy: disable-error-code="empty-body"
# (methods marked native have their bodies in C++)

from __future__ import annotations

from dataclasses import dataclass

from fastkv.errors import RequestError
from fastkv.scheduler._native import core, native
from fastkv.scheduler.events import KVCacheEvent, events_of


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the device level (blocks) and of counters since the manager was made.

    Attributes:
        num_blocks: free + evictable + held; after a shrink, blocks that drain are among them.
        free: nobody has them.
        evictable: published, not held.
        held: in a request's block table, pinned, or in a copy.
        open_requests: opened, not released.
        matches: requests that match was called for (again after a preemption, not while a request waits).
        queried_tokens: tokens of those requests.
        hit_blocks: blocks that match found.
        hit_tokens: their tokens.
        published_blocks: blocks that became findable.
        duplicate_blocks: blocks swapped for a copy that somebody else had published.
        evicted_blocks: published blocks that had to go.
    """

    num_blocks: int
    free: int
    evictable: int
    held: int
    open_requests: int
    matches: int
    queried_tokens: int
    hit_blocks: int
    hit_tokens: int
    published_blocks: int
    duplicate_blocks: int
    evicted_blocks: int

    @property
    def available(self) -> int:
        """Blocks that allocate can hand out now."""
        return self.free + self.evictable


class CacheAdmin(core.Manager):
    """Base of CacheManager, which makes it."""

    block_size: int
    _weights_version: str

    def pin(self, request_id: str, num_blocks: int | None = None) -> int:
        """Keep the request's leading published blocks (all by default), whatever happens to the request.

        Returns:
            A pin to give to unpin.

        Raises:
            RequestError: fewer blocks are published, or max_pinned_blocks would be passed.
        """
        return self._pin(request_id, -1 if num_blocks is None else num_blocks)

    @native
    def unpin(self, pin: int) -> None:
        """Give back a pin, once. reset and set_weights_version give back all pins."""

    @native
    def evict(self, num_blocks: int) -> int:
        """Forget up to num_blocks evictable device blocks, in the policy's order.

        allocate evicts by itself; this is for whoever wants blocks free ahead of time.

        Returns:
            How many were forgotten.
        """

    def resize(self, num_device_blocks: int, *, drain: bool = False) -> int:
        """Change the number of device blocks while in use, or set it when it was unknown.

        Growing adds the ids after the last. Shrinking evicts unheld blocks past the end, with what depends on them;
        held ones make it refuse, or with drain vanish when they are let go.

        Returns:
            How many blocks past the end are still in use; they are never handed out again.

        Raises:
            RequestError: not a size, or held blocks are in the way and drain is off.
        """
        return self._resize(num_device_blocks, drain)

    @native
    def reset(self) -> None:
        """Forget every published block and pin.

        Raises:
            RequestError: requests are open.
        """

    def set_weights_version(self, version: str) -> None:
        """The weights changed: nothing that was computed before is ever found again, at any level.

        Open requests keep their blocks and may go on, but what they compute is not published until they were
        preempted and recomputed. The version goes into the digests of requests opened from now on.
        """
        if not isinstance(version, str) or not version:
            raise RequestError(f"weights version {version!r} must be a non-empty str")
        self._weights_version, self._has_version = version, True
        self._invalidate()

    @property
    def weights_version(self) -> str:
        """What set_weights_version was told last; "" before."""
        return self._weights_version

    def take_events(self, *, everything: bool = False) -> list[KVCacheEvent]:
        """Blocks that became findable at a level or ceased to be since the last call, oldest first.

        Call it after a step was launched: digests are computed here. A log that nobody reads for long is replaced by
        AllBlocksCleared and everything that is findable then.

        Args:
            everything: AllBlocksCleared and everything that is findable now, for a reader that starts late.
        """
        return events_of(self._take_events(everything), self.block_size)

    def stats(self) -> CacheStats:
        """Counts of now and counters since the start."""
        num_blocks, free, evictable, held, evicted = self._counts(0)
        matches, queried, hits, published, duplicates = self._counters()
        return CacheStats(
            num_blocks=num_blocks,
            free=free,
            evictable=evictable,
            held=held,
            open_requests=self._num_open(),
            matches=matches,
            queried_tokens=queried,
            hit_blocks=hits,
            hit_tokens=hits * self.block_size,
            published_blocks=published,
            duplicate_blocks=duplicates,
            evicted_blocks=evicted,
        )

    @native
    def bookkeeping_bytes(self) -> int:
        """Memory of pools and index without the tokens, when all blocks are in use."""

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch; O(everything), for tests and diagnosis. Raises InvariantError."""
        self._check()
