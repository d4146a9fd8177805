"""Fixtures of the storage tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that open hundreds of stores: each opening syncs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)
