"""Decides which blocks hold what: pools, prefix index, policies, CacheManager. No paddle."""

from fastkv.core.digest import Identity, ImageSpan
from fastkv.scheduler.events import EventStream
from fastkv.scheduler.manager import BlockCopy, CacheManager, CacheStats, MatchResult
from fastkv.scheduler.policy import EvictionPolicy

__all__ = [
    "BlockCopy",
    "CacheManager",
    "CacheStats",
    "EventStream",
    "EvictionPolicy",
    "Identity",
    "ImageSpan",
    "MatchResult",
]
