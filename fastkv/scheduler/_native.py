"""Finds the native scheduler core, `fastkv._core` (custom_ops/core). Called by the scheduler's classes only."""

from __future__ import annotations

from fastkv.errors import ConfigError

try:
    from fastkv import _core as core
except ImportError as error:
    raise ConfigError(
        f"the native scheduler core cannot be loaded ({error}); build it: pip install --no-build-isolation -e ."
    ) from error

__all__ = ["core"]
