"""Published blocks, found by content.

Owns the tree of published blocks: a node is one full, computed, confirmed block, named by (parent node, identity
bytes, tokens), hence immutable. Called by the CacheManager only.

    publish            hold             release of the last holder           evict
    ---------> HELD  <-------- EVICTABLE <------------------------ HELD    EVICTABLE ------> gone at this level

Always holds: holders hold whole prefixes, so ref_count(parent) >= ref_count of each child; a node findable at a level
has its parent findable there or at a faster level; a node with no copy at any level is out of the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastkv.errors import InvariantError
from fastkv.scheduler.policy import EvictionPolicy, LruPolicy

_Key = tuple[int, bytes, bytes]


class Node:
    """One published block. device_block and host_block are -1 where the block has no copy."""

    __slots__ = ("children", "device_block", "extra", "host_block", "node_id", "parent", "ref_count", "tokens")

    def __init__(self, node_id: int, parent: Node | None, extra: bytes, tokens: bytes, device_block: int) -> None:
        self.node_id, self.parent, self.extra, self.tokens = node_id, parent, extra, tokens
        self.device_block, self.host_block, self.ref_count, self.children = device_block, -1, 0, 0

    def key(self) -> _Key:
        """What the node is found by."""
        return (self.parent.node_id if self.parent else -1, self.extra, self.tokens)


class PrefixIndex:
    """Content -> node, holders, and the eviction order of the device level."""

    def __init__(self) -> None:
        self._nodes: dict[_Key, Node] = {}
        self._next_id = 0
        self._evictable: EvictionPolicy[Node] = LruPolicy()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def num_evictable(self) -> int:
        """Device blocks that are published and not held."""
        return len(self._evictable)

    def find(self, parent: Node | None, extra: bytes, tokens: bytes) -> Node | None:
        """The child of parent with this content."""
        return self._nodes.get((parent.node_id if parent else -1, extra, tokens))

    def insert(self, parent: Node | None, extra: bytes, tokens: bytes, device_block: int) -> Node:
        """Publish a block whose content is not in the index; the caller holds it from now on (ref_count 1)."""
        node = Node(self._next_id, parent, extra, tokens, device_block)
        if node.key() in self._nodes:
            raise InvariantError(f"block {device_block} is published already")
        self._next_id += 1
        node.ref_count = 1
        if parent:
            parent.children += 1
        self._nodes[node.key()] = node
        return node

    def hold(self, node: Node) -> None:
        """One more holder of a node, whose parent the holder holds too."""
        if node.ref_count == 0:
            self._evictable.remove(node)
        node.ref_count += 1

    def release(self, path: Sequence[Node]) -> None:
        """A holder lets go of a whole prefix, root first in path."""
        for node in reversed(path):
            node.ref_count -= 1
            if node.ref_count == 0:
                self._evictable.add(node)

    def evict(self) -> int:
        """Forget the next node of the eviction order; returns its device block, which nobody has now."""
        node = self._evictable.pop()
        if node.children or node.ref_count:
            raise InvariantError(f"block {node.device_block} is to be evicted with children or holders")
        del self._nodes[node.key()]
        if node.parent:
            node.parent.children -= 1
        return node.device_block

    def clear(self) -> list[int]:
        """Forget everything; returns the device blocks, which nobody has now. No node may be held."""
        blocks = [node.device_block for node in self]
        self._nodes.clear()
        self._evictable = LruPolicy()
        return blocks

    def check_integrity(self) -> None:
        """Recompute children, findability and the evictable set. Raises InvariantError."""
        children: dict[int, int] = {}
        evictable = 0
        for key, node in self._nodes.items():
            if key != node.key():
                raise InvariantError(f"node {node.node_id} is filed under a foreign key")
            if node.parent:
                if self._nodes.get(node.parent.key()) is not node.parent:
                    raise InvariantError(f"node {node.node_id} is findable and its parent is not")
                if node.parent.ref_count < node.ref_count:
                    raise InvariantError(f"node {node.node_id} has more holders than its parent")
                children[node.parent.node_id] = children.get(node.parent.node_id, 0) + 1
            if (node.ref_count == 0) != (node in self._evictable):
                raise InvariantError(f"node {node.node_id} has {node.ref_count} holders and is in the wrong set")
            evictable += node.ref_count == 0
        if evictable != len(self._evictable):
            raise InvariantError("the eviction order holds nodes that are not in the index")
        for node in self:
            if node.children != children.get(node.node_id, 0):
                raise InvariantError(f"node {node.node_id} counts {node.children} children")
