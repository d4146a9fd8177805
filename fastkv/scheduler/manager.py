"""CacheManager: a request's whole life in the cache, as bookkeeping only. It never touches memory.

Owns every request's tokens, block table and holds. Called by the engine's scheduler:

    open -> match -> allocate -> (append | publish | allocate)* -> release
              ^----------------- preempt <---------'

A request's block table is, in token order, [published blocks it holds | blocks of its own]. Always holds, and
check_integrity() recomputes it: free + evictable + held = num_blocks with no id in two sets; every call that raises
has changed nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastkv.core.digest import NO_IDENTITY, Identity, as_token_array, whole_image_boundary
from fastkv.errors import ConfigError, InvariantError, OutOfBlocksError, RequestError
from fastkv.scheduler.block_pool import DeviceBlockPool, HostBlockPool
from fastkv.scheduler.prefix_index import Node, PrefixIndex

BlockIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What the cache already holds of a request: three runs of whole blocks, consecutive in token order.

    Attributes:
        device_blocks: int32 ids, usable at once; they head the request's block table.
        host_blocks: int32 host ids of the blocks after those; to be loaded into allocated device blocks.
        num_storage_blocks: blocks after those that storage is known to hold.
        num_tokens: tokens of all three runs; at least one token of the request is not among them.
        num_device_tokens: tokens of the device run.
    """

    device_blocks: BlockIds
    host_blocks: BlockIds
    num_storage_blocks: int
    num_tokens: int
    num_device_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the device level (blocks) and of counters since the manager was made.

    Attributes:
        num_blocks: free + evictable + held.
        free: nobody has them.
        evictable: published, not held.
        held: in a request's block table, or in a copy.
        open_requests: opened, not released.
        matches: calls of match.
        queried_tokens: tokens of the requests of those calls.
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


class _Request:
    """One open request. path[i] is the published node of table[i]; table is longer by the blocks of its own."""

    __slots__ = ("computed", "extras", "identity", "path", "table", "tokens")

    def __init__(self, tokens: array[int], identity: Identity, extras: dict[int, bytes]) -> None:
        self.tokens, self.identity, self.extras = tokens, identity, extras
        self.path: list[Node] = []
        self.table: list[int] = []
        self.computed = 0

    def block_tokens(self, block: int, block_size: int) -> bytes:
        return self.tokens[block * block_size : (block + 1) * block_size].tobytes()


class CacheManager:
    """Prefix caching and paged allocation for many requests.

    Args:
        num_device_blocks: blocks of the device pool.
        block_size: tokens of a block.
        enable_prefix_caching: off: match finds nothing and publish publishes nothing.
        num_host_blocks: blocks of the host pool.

    Raises:
        ConfigError: a count that is no pool.
    """

    def __init__(
        self,
        num_device_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size {block_size} must be at least 1 token")
        if num_device_blocks < 1 or num_host_blocks < 0:
            raise ConfigError(
                f"num_device_blocks {num_device_blocks} must be at least 1 and num_host_blocks {num_host_blocks} "
                "at least 0; raise the memory budget"
            )
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._device = DeviceBlockPool(num_device_blocks)
        self._host = HostBlockPool(num_host_blocks)
        self._index = PrefixIndex()
        self._requests: dict[str, _Request] = {}
        self._matches = self._queried = self._hits = self._published = self._duplicates = self._evicted = 0

    def open(self, request_id: str, tokens: object, identity: Identity = NO_IDENTITY) -> None:
        """Make a request known; it has no blocks yet.

        Args:
            request_id: non-empty, not open already.
            tokens: prompt token ids, at least one; copied (see core.digest.as_token_array for what is accepted).
            identity: what besides the tokens makes its KV what it is.

        Raises:
            RequestError: a bad or known id, no tokens, bad tokens, an image past the tokens.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request id {request_id!r} must be a non-empty str")
        if request_id in self._requests:
            raise RequestError(f"request {request_id!r} is open already; release it first or use another id")
        row = as_token_array(tokens)
        if not len(row):
            raise RequestError(f"request {request_id!r} has no tokens; give at least one")
        if identity.images and identity.images[-1].end > len(row):
            raise RequestError(
                f"request {request_id!r} has {len(row)} tokens and an image that ends at {identity.images[-1].end}"
            )
        self._requests[request_id] = _Request(
            array("i", row.tobytes()), identity, identity.block_extras(self.block_size)
        )

    def match(self, request_id: str) -> MatchResult:
        """Find the longest cached prefix, whole blocks, and hold it until release or preempt.

        At least one token is left to compute, and no image is cut. Legal until the request has blocks of its own or
        computed tokens; a second call replaces the first.

        Raises:
            RequestError: unknown id, or the request has blocks of its own.
        """
        request = self._get(request_id)
        if len(request.table) > len(request.path) or request.computed > len(request.path) * self.block_size:
            raise RequestError(f"request {request_id!r} has blocks of its own; match before allocate, or preempt")
        self._index.release(request.path)
        request.path, request.table, request.computed = [], [], 0
        if self.enable_prefix_caching:
            path = self._find(request)
            for node in path:
                self._index.hold(node)
            request.path, request.table = path, [node.device_block for node in path]
            request.computed = len(path) * self.block_size
        self._matches += 1
        self._queried += len(request.tokens)
        self._hits += len(request.path)
        return MatchResult(
            np.array(request.table, dtype=np.int32),
            np.empty(0, dtype=np.int32),
            0,
            request.computed,
            request.computed,
        )

    def allocate(self, request_id: str, num_blocks: int) -> BlockIds:
        """Give the request num_blocks more blocks of its own, evicting as needed: all of them, or none.

        Returns:
            int32 ids, in block table order; they follow what the table holds already.

        Raises:
            RequestError: unknown id, or num_blocks is negative.
            OutOfBlocksError: fewer are free or evictable; nothing was evicted.
        """
        ids = self.try_allocate(request_id, num_blocks)
        if ids is None:
            available = self._device.num_free + self._index.num_evictable
            raise OutOfBlocksError(num_blocks, available, self._device.num_blocks)
        return ids

    def try_allocate(self, request_id: str, num_blocks: int) -> BlockIds | None:
        """allocate, with None instead of OutOfBlocksError."""
        request = self._get(request_id)
        if num_blocks < 0:
            raise RequestError(f"cannot allocate {num_blocks} blocks for {request_id!r}; ask for 0 or more")
        if num_blocks > self._device.num_free + self._index.num_evictable:
            return None
        while self._device.num_free < num_blocks:
            self._device.free([self._index.evict()])
            self._evicted += 1
        ids = self._device.allocate(num_blocks)
        request.table += ids
        return np.array(ids, dtype=np.int32)

    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """How many more blocks the request needs so that its first num_tokens tokens have a place; never negative."""
        request = self._get(request_id)
        if num_tokens < 0:
            raise RequestError(f"num_tokens {num_tokens} of {request_id!r} must be 0 or more")
        return max(0, -(-num_tokens // self.block_size) - len(request.table))

    def append(self, request_id: str, tokens: object) -> None:
        """Add confirmed tokens to the end of the request (sampled, or accepted by speculation). It gets no blocks.

        Raises:
            RequestError: unknown id or bad tokens.
        """
        request = self._get(request_id)
        request.tokens.frombytes(as_token_array(tokens).tobytes())

    def publish(self, request_id: str, num_computed_tokens: int) -> int:
        """Say that the KV of the first num_computed_tokens tokens is computed; full blocks of them become findable.

        A block that somebody else published first is swapped in the request's table for the published copy, and its
        own block is freed: write the block table again before the next step.

        Returns:
            How many leading blocks of the request are published now.

        Raises:
            RequestError: unknown id; fewer tokens than before; more than the confirmed tokens or than its blocks hold.
        """
        request = self._get(request_id)
        limit = min(len(request.tokens), len(request.table) * self.block_size)
        if not request.computed <= num_computed_tokens <= limit:
            raise RequestError(
                f"request {request_id!r} cannot have {num_computed_tokens} computed tokens: it had {request.computed}, "
                f"{len(request.tokens)} tokens are confirmed and its {len(request.table)} blocks hold "
                f"{len(request.table) * self.block_size}"
            )
        request.computed = num_computed_tokens
        if self.enable_prefix_caching:
            for block in range(len(request.path), num_computed_tokens // self.block_size):
                self._publish_block(request, block)
        return len(request.path)

    def preempt(self, request_id: str) -> None:
        """Take all blocks and holds from a request that stays open with all its tokens; match starts it again."""
        self._drop_blocks(self._get(request_id))

    def release(self, request_id: str) -> None:
        """The request is done or aborted, at any point: its published blocks become evictable, the others free.

        Raises:
            RequestError: unknown id (a double release).
        """
        self._drop_blocks(self._get(request_id))
        del self._requests[request_id]

    def reset(self) -> None:
        """Forget every published block.

        Raises:
            RequestError: requests are open.
        """
        if self._requests:
            raise RequestError(f"{len(self._requests)} requests are open; release them before reset")
        self._device.free(self._index.clear())

    def block_table(self, request_id: str) -> BlockIds:
        """The request's block ids in token order, int32 [blocks], a copy."""
        return np.array(self._get(request_id).table, dtype=np.int32)

    def write_block_table(self, request_id: str, out_row: BlockIds) -> int:
        """Write the block table into a caller's int32 [max_blocks] row and -1 into the rest of it.

        Returns:
            How many blocks were written.

        Raises:
            RequestError: unknown id, or a row that is no writable int32 row or too short.
        """
        table = self._get(request_id).table
        if not isinstance(out_row, np.ndarray) or out_row.dtype != np.int32 or out_row.ndim != 1:
            raise RequestError("out_row must be a one-dimensional int32 array")
        if not out_row.flags.writeable or len(out_row) < len(table):
            raise RequestError(
                f"out_row has {len(out_row)} places (writable: {out_row.flags.writeable}), {request_id!r} has "
                f"{len(table)} blocks"
            )
        out_row[: len(table)] = table
        out_row[len(table) :] = -1
        return len(table)

    def num_tokens(self, request_id: str) -> int:
        """Confirmed tokens of the request: the prompt and what was appended."""
        return len(self._get(request_id).tokens)

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens whose KV is in the request's blocks: what match found or publish was told."""
        return self._get(request_id).computed

    def stats(self) -> CacheStats:
        """Counts of now and counters since the start."""
        free, evictable = self._device.num_free, self._index.num_evictable
        return CacheStats(
            num_blocks=self._device.num_blocks,
            free=free,
            evictable=evictable,
            held=self._device.num_blocks - free - evictable,
            open_requests=len(self._requests),
            matches=self._matches,
            queried_tokens=self._queried,
            hit_blocks=self._hits,
            hit_tokens=self._hits * self.block_size,
            published_blocks=self._published,
            duplicate_blocks=self._duplicates,
            evicted_blocks=self._evicted,
        )

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch; O(everything), for tests and diagnosis. Raises InvariantError."""
        self._device.check_integrity()
        self._host.check_integrity()
        self._index.check_integrity()
        owners: dict[int, str] = {}
        holders: dict[int, int] = {}
        for request_id, request in self._requests.items():
            for block_id in request.table[len(request.path) :]:
                self._claim(owners, block_id, f"request {request_id!r}")
            for node, block_id in zip(request.path, request.table, strict=False):
                if node.device_block != block_id:
                    raise InvariantError(f"request {request_id!r} holds {node.device_block}, its table says {block_id}")
                holders[node.node_id] = holders.get(node.node_id, 0) + 1
        for node in self._index:
            self._claim(owners, node.device_block, f"node {node.node_id}")
            if node.ref_count != holders.get(node.node_id, 0):
                raise InvariantError(f"node {node.node_id} counts {node.ref_count} holders")
        if len(owners) + self._device.num_free != self._device.num_blocks:
            raise InvariantError(f"{self._device.num_blocks - len(owners) - self._device.num_free} blocks leaked")

    def _claim(self, owners: dict[int, str], block_id: int, owner: str) -> None:
        if block_id in owners or self._device.is_free(block_id):
            raise InvariantError(f"block {block_id} belongs to {owner} and to {owners.get(block_id, 'the free list')}")
        owners[block_id] = owner

    def _get(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"request {request_id!r} is not open; open it first, release it once")
        return request

    def _find(self, request: _Request) -> list[Node]:
        path: list[Node] = []
        for block in range((len(request.tokens) - 1) // self.block_size):
            node = self._index.find(
                path[-1] if path else None,
                request.extras.get(block, b""),
                request.block_tokens(block, self.block_size),
            )
            if node is None:
                break
            path.append(node)
        whole = whole_image_boundary(len(path) * self.block_size, self.block_size, request.identity.images)
        return path[: whole // self.block_size]

    def _publish_block(self, request: _Request, block: int) -> None:
        parent = request.path[-1] if request.path else None
        tokens, extra = request.block_tokens(block, self.block_size), request.extras.get(block, b"")
        node = self._index.find(parent, extra, tokens)
        if node is None:
            node = self._index.insert(parent, extra, tokens, request.table[block])
            self._published += 1
        else:
            self._index.hold(node)
            self._device.free([request.table[block]])
            request.table[block] = node.device_block
            self._duplicates += 1
        request.path.append(node)

    def _drop_blocks(self, request: _Request) -> None:
        own = request.table[len(request.path) :]
        self._index.release(request.path)
        self._device.free(reversed(own))
        request.path, request.table, request.computed = [], [], 0
