"""Short ways to drive a CacheManager as an engine does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from fastkv.core.digest import NO_IDENTITY, Identity
from fastkv.scheduler import CacheManager

BLOCK_SIZE = 4


@pytest.fixture
def manager() -> CacheManager:
    """The toy of the fault tests: 4 device blocks of 4 tokens."""
    return CacheManager(4, BLOCK_SIZE)


@pytest.fixture
def admit() -> Callable[..., int]:
    """Open, match, allocate and compute a whole prompt; returns the cached tokens that match found."""

    def run(manager: CacheManager, request_id: str, tokens: Sequence[int], identity: Identity = NO_IDENTITY) -> int:
        manager.open(request_id, tokens, identity)
        cached = manager.match(request_id).num_tokens
        manager.allocate(request_id, manager.blocks_needed(request_id, len(tokens)))
        manager.publish(request_id, len(tokens))
        return cached

    return run
