"""Which block goes first when room is needed.

Names the eviction policies; the orders themselves are native (custom_ops/core/eviction.h says exactly what each does
and why it is O(1) a block). Read by the CacheManager and the command line.
"""

from __future__ import annotations

from enum import Enum

from fastkv.errors import ConfigError


class EvictionPolicy(str, Enum):
    """Order in which unheld blocks leave; children always go before parents.

    LRU: blocks leave in the order in which their last holder let go; of one release, the deepest first.
    TWO_QUEUE: as LRU, but blocks that no request has found since they were published leave first while they fill more
        than half of the pool, so that prompts seen once do not push out the prefixes in use.
    """

    LRU = "lru"
    TWO_QUEUE = "2q"


def parse_policy(value: str | EvictionPolicy) -> EvictionPolicy:
    """Turn a config's word into a policy.

    Raises:
        ConfigError: it is none.
    """
    try:
        return EvictionPolicy(value)
    except ValueError:
        allowed = ", ".join(policy.value for policy in EvictionPolicy)
        raise ConfigError(f"unknown eviction policy {value!r}; allowed: {allowed}") from None
