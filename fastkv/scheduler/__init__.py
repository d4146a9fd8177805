"""Decides which blocks hold what: pools, prefix index, policies, CacheManager. No paddle."""

from fastkv.core.digest import Identity, ImageSpan
from fastkv.scheduler.manager import CacheManager, CacheStats, MatchResult

__all__ = ["CacheManager", "CacheStats", "Identity", "ImageSpan", "MatchResult"]
