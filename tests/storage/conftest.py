"""Fixtures of the storage tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.storage_cases import store_config, toy_namespace

from fastkv.storage.file_config import FileStoreConfig


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that open hundreds of stores: each opening syncs."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def store(tmp_path: Path) -> FileStoreConfig:
    """Room for eight records of the toy namespace."""
    return store_config(tmp_path / "store", toy_namespace(), records=8)
