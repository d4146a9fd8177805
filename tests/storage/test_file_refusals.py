"""The file backend: what it refuses, and what it says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.storage_cases import (
    digests,
    get,
    pattern,
    put,
    store_config,
    toy_namespace,
)

from fastkv.errors import ConfigError, InvariantError, StorageError
from fastkv.storage import open_connector
from fastkv.storage.base import NO_DEADLINE, PutOutcome
from fastkv.storage.file import FileConnector
from fastkv.storage.file_config import FileStoreConfig

NAMESPACE = toy_namespace()


def test_second_writer_is_refused_and_told_who_writes(store: FileStoreConfig) -> None:
    first = FileConnector.open(store, NAMESPACE, 0)
    with pytest.raises(StorageError, match=rf"process {os.getpid()}\b.*storage\.path"):
        FileConnector.open(store, NAMESPACE, 0)
    assert put(first, 1) == ["stored"]
    first.close()
    assert get(FileConnector.open(store, NAMESPACE, 0), 1) == ["hit"]


def test_limit_below_one_record_is_refused_with_the_need(tmp_path: Path) -> None:
    needed = store_config(tmp_path / "store", NAMESPACE, records=1).max_bytes
    with pytest.raises(ConfigError, match=f"at least {needed}"):
        FileConnector.open(FileStoreConfig(tmp_path / "store", needed - 1), NAMESPACE, 0)
    FileConnector.open(FileStoreConfig(tmp_path / "store", needed), NAMESPACE, 0).close()


@pytest.mark.parametrize(
    "options",
    [
        {"max_bytes": 0},
        {"max_bytes": -1},
        {"max_bytes": 1.5},
        {"max_bytes": True},
        {"segment_bytes": 0},
        {"io_threads": 0},
        {"durability": "forever"},
        {"lock_timeout_s": -1},
        {"lock_timeout_s": float("nan")},
    ],
)
def test_nonsense_config_is_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"storage.{next(iter(options))}"):
        FileStoreConfig(**{"path": tmp_path, "max_bytes": 1 << 20, **options})  # type: ignore[arg-type]


def test_path_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    for path, words in ((tmp_path / "file", "cannot be used"), (tmp_path / "full", "thesis.tex")):
        with pytest.raises(ConfigError, match=words):
            FileConnector.open(FileStoreConfig(path, 1 << 20), NAMESPACE, 0)
    assert (tmp_path / "full" / "thesis.tex").exists()


def test_store_of_another_format_is_refused(store: FileStoreConfig) -> None:
    FileConnector.open(store, NAMESPACE, 0).close()
    (store.path / "fastkv-store.json").write_text('{"format": "fastkv-store", "version": 2}\n')
    with pytest.raises(ConfigError, match="another format"):
        FileConnector.open(store, NAMESPACE, 0)


def test_rank_that_does_not_exist_is_refused(store: FileStoreConfig) -> None:
    with pytest.raises(ConfigError, match="rank 1"):
        open_connector(store, NAMESPACE, 1)


def test_misfit_batch_is_an_error_of_the_caller(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    size = connector.record_bytes
    good = pattern(1, size)
    frozen = good.copy()
    frozen.flags.writeable = False
    for names, buffers, words in (
        (digests(1, 2), [good], "2 digests with 1"),
        ([b"short"], [good], "32 bytes"),
        (digests(1), [np.zeros(size + 1, np.uint8)], f"1 to {size}"),
        (digests(1), [np.zeros(0, np.uint8)], "0 bytes"),
        (digests(1), [np.zeros(2 * size, np.uint8)[::2]], "contiguous"),
    ):
        with pytest.raises(InvariantError, match=words):
            connector.put(names, buffers, NO_DEADLINE)
        with pytest.raises(InvariantError, match=words):
            connector.get_into(names, buffers, NO_DEADLINE)
    with pytest.raises(InvariantError, match="read-only"):
        connector.get_into(digests(1), [frozen], NO_DEADLINE)
    assert connector.put(digests(1), [frozen], NO_DEADLINE) == (PutOutcome.STORED,)
    assert connector.put([], [], NO_DEADLINE) == ()
    assert len(connector) == 1


def test_closed_connector_reports_unavailable(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, 1)
    connector.close()
    connector.close()
    assert put(connector, 1) == ["unavailable"]
    assert get(connector, 1) == ["unavailable"]
    assert connector.remove(digests(1))[0].value == "unavailable"
    assert not connector.flush()
