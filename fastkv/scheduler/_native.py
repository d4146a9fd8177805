"""Finds the native scheduler core, `fastkv._core` (custom_ops/core). Called by the scheduler's classes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from fastkv.errors import ConfigError

try:
    from fastkv import _core as core
except ImportError as error:
    raise ConfigError(
        f"the native scheduler core cannot be loaded ({error}); build it: pip install --no-build-isolation -e ."
    ) from error

_Method = TypeVar("_Method", bound=Callable[..., Any])


def native(described: _Method) -> _Method:
    """Replace a method that is only signature and documentation here by the native method of the same name.

    A Python frame around a call that works for 0.2 us would be a third of its cost.
    """
    native = getattr(core.Manager, described.__name__, None)
    if native is None:
        raise ConfigError(
            f"the native scheduler core is older than fastkv's Python code (no {described.__name__}); build it again: "
            "make setup, or pip install --no-build-isolation -e ."
        )
    return cast("_Method", native)


__all__ = ["core", "native"]
