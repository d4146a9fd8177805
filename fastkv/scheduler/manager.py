"""CacheManager: a request's whole life in the cache, as bookkeeping only. It never touches memory.

The readable face of the native core (custom_ops/core/manager.h): every method is one native call over the whole
request, about a microsecond plus some nanoseconds a block. Called by the engine's scheduler:

    open -> match -> allocate -> (append | reserve_drafts | confirm | publish | allocate)* -> release
              ^------------------------- preempt <-----------------'       fork: a second request with the same past

A request's block table is, in token order, [published blocks it holds | blocks of its own]. Always holds, and
check_integrity() recomputes it: free + evictable + held = num_blocks with no id in two sets; every call that raises
has changed nothing. Calls may come from several threads; each is atomic.

Give tokens as contiguous int32 NumPy arrays (read in place, copied once) or lists of int; anything else that
core.digest.as_token_array takes is converted first.
"""

# mypy: disable-error-code="empty-body"
# (methods marked native have their bodies in C++)

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fastkv.core.digest import NO_IDENTITY, Identity
from fastkv.errors import ConfigError, RequestError
from fastkv.scheduler._native import core, native
from fastkv.scheduler.cache_admin import CacheAdmin, CacheStats
from fastkv.scheduler.policy import EvictionPolicy, parse_policy

BlockIds = npt.NDArray[np.int32]

MatchResult = core.MatchResult
"""What match found: device_blocks (int32 ids, they head the block table), host_blocks (int32 host ids of the blocks
after those, to be loaded into allocated device blocks), num_tokens (of both), num_device_tokens (usable at once)."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy on the device that must happen before the step that writes to target."""

    source: int
    target: int


class CacheManager(CacheAdmin):
    """Prefix caching and paged allocation for many requests.

    Args:
        num_device_blocks: blocks of the device pool; None while the worker has not profiled: requests can be opened,
            and resize() says how many there are.
        block_size: tokens of a block.
        enable_prefix_caching: off: match finds nothing and publish publishes nothing.
        num_host_blocks: blocks of the host pool.
        policy: which evictable block goes first.
        max_pinned_blocks: how many blocks pin() may keep; None: half of the device blocks that there are.
        record_events: keep a log of stored and removed blocks for take_events().
        clock: seconds; what priorities expire by.
        hash_mask: thins out the fast hash, for tests: 0 makes every block collide, and nothing else changes.

    Raises:
        ConfigError: a count that is no pool, an unknown policy.
    """

    def __init__(
        self,
        num_device_blocks: int | None,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        policy: str | EvictionPolicy = EvictionPolicy.LRU,
        max_pinned_blocks: int | None = None,
        record_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        hash_mask: int = 2**64 - 1,
    ) -> None:
        if not 1 <= block_size <= 2**20:
            raise ConfigError(f"block_size {block_size} must be at least 1 token and at most {2**20}")
        most = 2**31 - 1
        if (num_device_blocks is not None and not 1 <= num_device_blocks <= most) or not 0 <= num_host_blocks <= most:
            raise ConfigError(
                f"num_device_blocks {num_device_blocks} must be at least 1 and num_host_blocks {num_host_blocks} "
                f"at least 0, both at most {most}; change the memory budget"
            )
        if max_pinned_blocks is not None and max_pinned_blocks < 0:
            raise ConfigError(f"max_pinned_blocks is {max_pinned_blocks}; give 0 or more, or None for half of the pool")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.policy = parse_policy(policy)
        self._weights_version = ""
        super().__init__(
            -1 if num_device_blocks is None else num_device_blocks,
            num_host_blocks,
            block_size,
            enable_prefix_caching,
            self.policy.value,
            -1 if max_pinned_blocks is None else max_pinned_blocks,
            secrets.randbits(64),
            hash_mask,
            record_events,
            clock,
        )

    # -- a request's life ---------------------------------------------------------------------------------------

    @native
    def open(
        self,
        request_id: str,
        tokens: object,
        identity: Identity = NO_IDENTITY,
        *,
        priority: int = 0,
        priority_ttl_s: float = float("inf"),
    ) -> None:
        """Make a request known; it has no blocks yet.

        Args:
            request_id: non-empty, not open already.
            tokens: prompt token ids, at least one; copied.
            identity: what besides the tokens makes its KV what it is.
            priority: 0 to 7; blocks of a higher priority are evicted after all of a lower one.
            priority_ttl_s: how long after the request let go of its blocks the priority lasts; then they are evicted as
                if they had been used at that moment.

        Raises:
            RequestError: a bad or known id, no tokens, bad tokens, an image past the tokens, a bad priority.
        """

    def _open_described(
        self,
        request_id: str,
        tokens: object,
        identity: Identity = NO_IDENTITY,
        *,
        priority: int = 0,
        priority_ttl_s: float = float("inf"),
    ) -> None:
        """open, where there is an identity or a priority; the native open calls it."""
        if self._weights_version and not identity.weights_version:
            identity = replace(identity, weights_version=self._weights_version)
        images = [(image.start, image.end) for image in identity.images]
        self._open(request_id, tokens, identity.block_extras(self.block_size), images, priority, priority_ttl_s)

    @native
    def match(self, request_id: str) -> MatchResult:
        """Find the longest cached prefix, whole blocks, and hold it until release or preempt.

        At least one token is left to compute, and no image is cut. Legal until the request has blocks of its own or
        computed tokens; a second call replaces the first.

        Raises:
            RequestError: unknown id, or the request has blocks of its own.
        """

    @native
    def allocate(self, request_id: str, num_blocks: int) -> BlockIds:
        """Give the request num_blocks more blocks of its own, evicting as needed: all of them, or none.

        Returns:
            int32 ids, in block table order; they follow what the table holds already.

        Raises:
            RequestError: unknown id, num_blocks is negative, or the pool's size is not known yet.
            OutOfBlocksError: fewer are free or evictable; nothing was evicted.
        """

    @native
    def try_allocate(self, request_id: str, num_blocks: int) -> BlockIds | None:
        """allocate, with None instead of OutOfBlocksError."""

    @native
    def try_allocate_into(self, request_id: str, num_blocks: int, out_row: BlockIds) -> bool:
        """try_allocate straight into the caller's block table, without an array of its own.

        Args:
            request_id: an open request.
            num_blocks: how many.
            out_row: the request's row, writable contiguous int32 [max_blocks]; the new ids are written to the places
                that they take in the table, and the rest of the row is left alone.

        Returns:
            False when fewer blocks are free or evictable; nothing was evicted or written then.

        Raises:
            RequestError: as allocate, or out_row is no such row or too short; nothing was changed.
        """

    @native
    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """How many more blocks the request needs so that its first num_tokens tokens have a place; never negative."""

    @native
    def append(self, request_id: str, tokens: object) -> None:
        """Add confirmed tokens (or one, as an int) to the end of the request. It gets no blocks.

        Raises:
            RequestError: unknown id or bad tokens.
        """

    @native
    def publish(self, request_id: str, num_computed_tokens: int) -> int:
        """Say that the KV of the first num_computed_tokens tokens is computed; full blocks of them become findable.

        A block that somebody else published first is swapped in the request's table for the published copy, and its
        own block is freed: write the block table again before the next step.

        Returns:
            How many leading blocks of the request are shared now.

        Raises:
            RequestError: unknown id; fewer tokens than before; more than the confirmed tokens or than its blocks hold.
        """

    @native
    def preempt(self, request_id: str) -> None:
        """Take all blocks and holds from a request that stays open with all its tokens; match starts it again."""

    @native
    def release(self, request_id: str) -> None:
        """The request is done or aborted, at any point: its published blocks become evictable, the others free.

        Raises:
            RequestError: unknown id (a double release).
        """

    # -- speculation and forks ----------------------------------------------------------------------------------

    @native
    def reserve_drafts(self, request_id: str, num_drafts: int) -> BlockIds | None:
        """Make room for num_drafts tokens past the confirmed ones.

        Returns:
            int32 ids of the blocks that were added (often none); None when too few blocks are free or evictable, and
            then nothing was added.
        """

    @native
    def confirm(self, request_id: str, tokens: object) -> int:
        """Add the tokens that verification accepted, and give back the blocks past them.

        Returns:
            How many blocks were given back.
        """

    def fork(self, parent_id: str, child_id: str) -> list[BlockCopy]:
        """Open child_id with the parent's tokens, identity and computed KV (n > 1, beams).

        Full computed blocks are shared. The partial block, if there is one, is copied on write, and as both requests
        will write to it next, the copy is due now.

        Returns:
            Copies to perform on the device before either request's next step: none, or one.

        Raises:
            RequestError: unknown parent, child open already.
            OutOfBlocksError: no block for the partial one; nothing was changed.
        """
        return [BlockCopy(*copy) for copy in self._fork(parent_id, child_id)]

    # -- block tables -------------------------------------------------------------------------------------------

    @native
    def block_table(self, request_id: str) -> BlockIds:
        """The request's block ids in token order, int32 [blocks], a copy."""

    def write_block_table(self, request_id: str, out_row: object) -> int:
        """Write the block table into a caller's int32 [max_blocks] row and -1 into the rest of it.

        Args:
            request_id: an open request.
            out_row: contiguous int32 NumPy row, or a Paddle tensor in host memory.

        Returns:
            How many blocks were written.

        Raises:
            RequestError: unknown id, or a row that is no writable int32 row or too short.
        """
        if isinstance(out_row, np.ndarray):
            return self._write_row(request_id, out_row)
        address, shape = _tensor_memory(out_row)
        if len(shape) != 1:
            raise RequestError(f"out_row has shape {shape}; it must be one-dimensional")
        return self._write_row_at(request_id, address, shape[0])

    def write_block_tables(self, request_ids: Sequence[str], out: object) -> None:
        """Write the block tables of a batch into an int32 [batch, max_blocks] array or Paddle tensor, padded with -1.

        Rows past the batch are left alone.

        Raises:
            RequestError: an unknown id, or memory that does not fit; nothing was written.
        """
        if isinstance(out, np.ndarray):
            if out.dtype != np.int32 or not out.flags.c_contiguous or not out.flags.writeable:
                raise RequestError("out must be a writable, contiguous int32 array")
            address, shape = int(out.__array_interface__["data"][0]), tuple(out.shape)
        else:
            address, shape = _tensor_memory(out)
        if len(shape) != 2 or shape[0] < len(request_ids):
            raise RequestError(f"out has shape {shape}; {len(request_ids)} requests need [batch, max_blocks]")
        self._write_rows_at(list(request_ids), address, shape[1])

    @native
    def num_tokens(self, request_id: str) -> int:
        """Confirmed tokens of the request: the prompt and what was appended."""

    @native
    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens whose KV is in the request's blocks: what match found or publish was told."""

    @native
    def is_open(self, request_id: str) -> bool:
        """Whether the request is open."""

    def prefix_digests(self, request_id: str, num_blocks: int | None = None) -> list[bytes]:
        """SHA-256 prefix digests of the request's leading full blocks, as core.digest defines them.

        Cost: one SHA-256 over each block that was not asked for before; the GIL is released meanwhile.
        """
        return self._digests(request_id, -1 if num_blocks is None else num_blocks)


def _tensor_memory(out: object) -> tuple[int, tuple[int, ...]]:
    """Address and shape of a Paddle tensor's int32 memory on the host; duck-typed, so paddle is not imported."""
    pointer, place = getattr(out, "data_ptr", None), getattr(out, "place", None)
    if not callable(pointer) or place is None:
        raise RequestError(
            f"out is a {type(out).__name__}; give an int32 NumPy array or a Paddle tensor in host memory"
        )
    dtype, contiguous = str(getattr(out, "dtype", "")), out.is_contiguous()  # type: ignore[attr-defined]
    if not dtype.endswith("int32") or not contiguous or not (place.is_cpu_place() or place.is_cuda_pinned_place()):
        raise RequestError(f"out is a {dtype} tensor on {place}; it must be contiguous int32 in host memory")
    return int(pointer()), tuple(out.shape)  # type: ignore[attr-defined]


__all__ = ["BlockCopy", "BlockIds", "CacheManager", "CacheStats", "MatchResult"]
