"""Published blocks, found by content.

Owns the tree of published blocks: a node is one full, computed, confirmed block, named by (parent node, identity bytes,
tokens), hence immutable. The CacheManager keeps such an index natively (custom_ops/core/prefix_index.h and node.h
explain layout, states and costs); this class is the same code by itself, for tests and for schedulers of their own.

    publish            hold             release of the last holder           evict
    ---------> HELD  <-------- EVICTABLE <------------------------ HELD    EVICTABLE ------> gone at this level

Always holds: holders hold whole prefixes; a node findable at a level has its parent findable there or at a faster
level; blocks leave in leaf-first LRU order; a node with no copy at any level is out of the index.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from fastkv.core.digest import NO_IDENTITY, Identity
from fastkv.scheduler._native import core
from fastkv.scheduler.block_pool import DeviceBlockPool, HostBlockPool
from fastkv.scheduler.policy import EvictionPolicy


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Consecutive nodes from the root on and their device blocks; give it back with PrefixIndex.release."""

    nodes: tuple[int, ...]
    device_blocks: tuple[int, ...]


class PrefixIndex:
    """Content -> node, holders, and the eviction order of the device level.

    Args:
        block_size: tokens of a block.
        device: gets the blocks that leave the index; the blocks that are published come from it.
        policy: which evictable block goes first.
        hash_mask: thins out the fast hash, for tests: 0 makes every block collide, and nothing else changes.
    """

    def __init__(
        self,
        block_size: int,
        device: DeviceBlockPool,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        hash_mask: int = 2**64 - 1,
    ) -> None:
        self.block_size = block_size
        self._native = core.PrefixIndex(
            block_size, device.native, HostBlockPool(0).native, policy.value, secrets.randbits(64), hash_mask
        )

    def __len__(self) -> int:
        return self._native.num_nodes()

    @property
    def num_evictable(self) -> int:
        """Device blocks that are published and not held."""
        return self._native.num_evictable()

    def match(self, tokens: object, identity: Identity = NO_IDENTITY) -> HeldPrefix:
        """The longest published prefix of the tokens, in whole blocks; held from now on."""
        nodes = self._native.match(tokens, self._extras(identity))
        self._native.hold(nodes)
        return HeldPrefix(tuple(nodes), tuple(self._native.device_block(node) for node in nodes))

    def publish(self, tokens: object, device_blocks: Sequence[int], identity: Identity = NO_IDENTITY) -> HeldPrefix:
        """Make blocks of a prefix findable, from the root on; held from now on.

        A block whose content is published already goes back to the pool; the result names the published copy.
        """
        nodes, blocks = self._native.publish(tokens, self._extras(identity), list(device_blocks))
        return HeldPrefix(tuple(nodes), tuple(blocks))

    def release(self, prefix: HeldPrefix) -> None:
        """Give back a hold, once."""
        self._native.release(prefix.nodes)

    def evict(self, count: int) -> None:
        """Forget the next count blocks of the eviction order; the pool has them back.

        Raises:
            OutOfBlocksError: fewer are evictable; none was evicted.
        """
        self._native.evict(count)

    def check_integrity(self) -> None:
        """Recompute every invariant of the index. Raises InvariantError."""
        self._native.check()

    def _extras(self, identity: Identity) -> list[tuple[int, bytes]]:
        return sorted(identity.block_extras(self.block_size).items())
