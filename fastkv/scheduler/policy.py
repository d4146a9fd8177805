"""Which block goes first when room is needed.

Owns the eviction order of one level. Called by the prefix index, which adds a block when its last holder lets go and
removes it when somebody holds it again.

Leaf-first LRU, exactly: blocks leave in the order in which they became unheld; of the blocks that one release left
unheld, the deepest leaves first. Holders hold whole prefixes (a block and all its ancestors), so a child is never
let go after its parent: the block at the head of this order has no child at its level, and children always go before
parents without anybody looking for leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

Node = TypeVar("Node")


class EvictionPolicy(Protocol[Node]):
    """Order of the evictable blocks of one level."""

    def add(self, node: Node) -> None:
        """The node became unheld; of one release, deeper nodes are added first."""

    def remove(self, node: Node) -> None:
        """The node is held again, or leaves the level for another reason."""

    def pop(self) -> Node:
        """Take out the node to evict now. Raises KeyError when there is none."""

    def __len__(self) -> int: ...

    def __contains__(self, node: object) -> bool: ...


class LruPolicy(Generic[Node]):
    """Leaf-first LRU in O(1) a block."""

    def __init__(self) -> None:
        self._order: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        """Append at the most recently used end."""
        self._order[node] = None

    def remove(self, node: Node) -> None:
        """Take the node out of the order."""
        del self._order[node]

    def pop(self) -> Node:
        """Take out the least recently used node."""
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, node: object) -> bool:
        return node in self._order
