"""Finds the native scheduler core, `fastkv._core` (custom_ops/core), and checks that it fits this Python code.

Called by the scheduler's classes only. The core carries a digest of the sources that it was built from; in a source
tree it is compared when the core is loaded (two milliseconds). An installed package has no sources: there both were
built together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from fastkv.errors import ConfigError

_REBUILD = "build it again: make setup, or pip install --no-build-isolation -e ."
_SOURCES = Path(__file__).parents[2] / "custom_ops" / "core"

try:
    from fastkv import _core as core
except ImportError as error:
    raise ConfigError(f"the native scheduler core cannot be loaded ({error}); {_REBUILD}") from error

_Method = TypeVar("_Method", bound=Callable[..., Any])


def sources_digest(folder: Path) -> str:
    """Names and contents of the core's sources as one SHA-256, as setup.py computes it; "" when there are none."""
    digest, paths = hashlib.sha256(), sorted([*folder.glob("*.cc"), *folder.glob("*.h")])
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest() if paths else ""


def check_built_from(built_from: str, folder: Path) -> None:
    """Refuse a core that was built from other sources than those beside this Python code.

    Raises:
        ConfigError: it is older (or newer) than the sources in the folder.
    """
    expected = sources_digest(folder)
    if expected and built_from != expected:
        raise ConfigError(
            f"the native scheduler core was built from other sources than {folder} holds "
            f"({built_from[:12] or 'unknown'} instead of {expected[:12]}); {_REBUILD}"
        )


def native(described: _Method) -> _Method:
    """Replace a method that is only signature and documentation here by the native method of the same name.

    A Python frame around a call that works for 0.2 us would be a third of its cost.
    """
    return cast("_Method", getattr(core.Manager, described.__name__))


check_built_from(getattr(core, "built_from", ""), _SOURCES)

__all__ = ["check_built_from", "core", "native", "sources_digest"]
