"""One limit over everything in a store: idle namespaces make room, those in use do not."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from helpers.storage_cases import digests, file_bytes, get, put, store_config, toy_namespace
from helpers.storage_faults import make_read_only, replace_call

from fastkv.errors import ConfigError, StorageError
from fastkv.storage.base import NO_DEADLINE
from fastkv.storage.file import FileConnector
from fastkv.storage.file_config import FileStoreConfig
from fastkv.storage.file_reader import FileLookup
from fastkv.storage.folder import DESCRIPTION_NAME, MARKER_NAME, FileLock, StoreFolder
from fastkv.storage.index_file import INDEX_NAME
from fastkv.storage.namespace import StorageNamespace

BASE = toy_namespace()


def version(number: int) -> StorageNamespace:
    return BASE.with_weights_version(f"weights-{number}")


def limit_for(path: Path, records: int) -> FileStoreConfig:
    return store_config(path, version(0), records=records)


def test_records_of_older_weights_make_room_longest_unused_first(tmp_path: Path) -> None:
    """After an update of the weights the old records are never read again, yet would fill the disk for ever."""
    config = limit_for(tmp_path, records=12)
    for number in range(3):
        connector = FileConnector.open(config, version(number), 0)
        put(connector, 0, 1, 2)
        connector.close()
        os.utime(tmp_path / version(number).digest.hex() / "namespace.json", (1000 + number, 1000 + number))
    newest = FileConnector.open(config, version(3), 0)
    for name in range(30):
        put(newest, name)
        assert file_bytes(tmp_path) <= config.max_bytes
    left = {namespace.digest for namespace in StoreFolder.existing(tmp_path).namespaces()}
    assert version(0).digest not in left
    assert version(3).digest in left
    assert len(newest) >= 8


def test_namespace_that_is_in_use_is_never_deleted(tmp_path: Path) -> None:
    config = limit_for(tmp_path, records=10)
    first = FileConnector.open(config, version(0), 0)
    put(first, *range(6))
    second = FileConnector.open(config, version(1), 0)
    outcomes = put(second, *range(8))
    assert 0 < outcomes.count("stored") < 8
    assert set(outcomes) == {"stored", "full"}
    assert file_bytes(tmp_path) <= config.max_bytes
    assert get(first, *range(6)) == ["hit"] * 6
    assert second.counters().get("growth_refused", 0) == 0
    first.check_integrity()
    second.check_integrity()


def test_second_model_on_a_full_store_in_use_is_refused(tmp_path: Path) -> None:
    config = limit_for(tmp_path, records=4)
    first = FileConnector.open(config, version(0), 0)
    put(first, *range(4))
    tight = FileStoreConfig(tmp_path, file_bytes(tmp_path))
    with pytest.raises(StorageError, match=r"limit of \d+ bytes.*in use"):
        FileConnector.open(tight, version(1), 0)
    assert get(first, *range(4)) == ["hit"] * 4


def test_two_ranks_share_the_limit_evenly(tmp_path: Path) -> None:
    space = toy_namespace(tp_size=2)
    config = store_config(tmp_path, space, records=6)
    ranks = [FileConnector.open(config, space, rank) for rank in (0, 1)]
    for name in range(20):
        for rank in ranks:
            put(rank, name)
    assert [len(rank) for rank in ranks] == [6, 6]
    assert file_bytes(tmp_path) <= config.max_bytes
    lookup = FileLookup(tmp_path, space)
    assert sum(lookup.contains(digests(name), NO_DEADLINE) for name in range(20)) == 6


def test_weights_version_set_at_run_time_misses_everywhere(tmp_path: Path) -> None:
    """Old weights' records are not found under the new version, and a late put goes where nobody looks."""
    config = limit_for(tmp_path, records=20)
    old = FileConnector.open(config, version(0), 0)
    put(old, 1)
    new = FileConnector.open(config, version(1), 0)
    lookup = FileLookup(tmp_path, version(1))
    assert get(new, 1) == ["miss"]
    put(old, 2)
    assert get(new, 2) == ["miss"]
    assert lookup.contains(digests(2), NO_DEADLINE) == 0
    old.close()
    assert put(old, 3) == ["unavailable"]


def test_deleting_a_namespace_in_use_is_refused(tmp_path: Path) -> None:
    connector = FileConnector.open(limit_for(tmp_path, records=4), version(0), 0)
    put(connector, 1)
    store = StoreFolder.existing(tmp_path)
    with store.locked():
        (listed,) = store.namespaces()
        assert listed.writer_pids == (str(os.getpid()),)
        with pytest.raises(StorageError, match=f"process {os.getpid()}"):
            store.delete(listed)
    assert get(connector, 1) == ["hit"]
    connector.close()
    with store.locked():
        (listed,) = store.namespaces()
        assert listed.writer_pids == ()
        store.delete(listed)
    assert store.namespaces() == []


def test_namespace_deleted_under_a_lookup_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    config = limit_for(tmp_path, records=4)
    connector, lookup = FileConnector.open(config, version(0), 0), FileLookup(tmp_path, version(0))
    put(connector, 1)
    assert lookup.contains(digests(1), NO_DEADLINE) == 1
    connector.close()
    store = StoreFolder.existing(tmp_path)
    with store.locked():
        store.delete(store.namespaces()[0])
    assert lookup.contains(digests(1), NO_DEADLINE) == 0
    again = FileConnector.open(config, version(0), 0)
    put(again, 1)
    assert lookup.contains(digests(1), NO_DEADLINE) == 1


def test_probing_who_writes_leaves_the_writer_s_name_alone(tmp_path: Path) -> None:
    connector = FileConnector.open(limit_for(tmp_path, records=4), version(0), 0)
    store = StoreFolder.existing(tmp_path)
    for _ in range(2):
        with store.locked():
            assert store.namespaces()[0].writer_pids == (str(os.getpid()),)
    connector.close()


def test_store_lock_that_is_held_stops_growth_but_not_the_caller(tmp_path: Path) -> None:
    config = limit_for(tmp_path, records=20)
    connector = FileConnector.open(config, version(0), 0)
    put(connector, 0)
    lock = FileLock.acquire(tmp_path / "store.lock", 0.0)
    assert lock is not None
    started = time.monotonic()
    names = range(1, 8)
    buffers = [bytearray(connector.record_bytes) for _ in names]
    outcomes = connector.put(digests(*names), buffers, started + 0.1)
    assert time.monotonic() - started < 2
    assert {outcome.value for outcome in outcomes} <= {"stored", "full", "timeout"}
    assert connector.counters()["growth_refused"] == 1
    lock.release()
    connector.check_integrity()


def test_store_that_two_processes_create_at_once_serves_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start together: one found no marker, then the other's files, and took them for somebody else's."""
    exists, others = Path.exists, [FileConnector.open]

    def exists_before_the_other_one(path: Path) -> bool:
        found = exists(path)
        if path.name == MARKER_NAME and others:
            others.pop()(limit_for(tmp_path, records=4), version(0), 0).close()
        return found

    monkeypatch.setattr(Path, "exists", exists_before_the_other_one)
    StoreFolder.open(tmp_path)
    assert not others
    assert len(StoreFolder.existing(tmp_path).namespaces()) == 1


def test_store_marker_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss the marker could be empty: then the whole store was refused as one of another format."""
    synced, renamed, rename = set[int](), set[str](), os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))

    def rename_what_is_synced(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in synced or target.name == INDEX_NAME  # flush syncs that one
        rename(source, target)
        renamed.add(target.name)

    replace_call(monkeypatch, "rename", rename_what_is_synced)
    FileConnector.open(limit_for(tmp_path / "store", records=4), version(0), 0).close()
    assert {MARKER_NAME, DESCRIPTION_NAME} <= renamed


def test_store_marker_written_by_two_of_one_pid_at_once_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers on one volume: both used one scratch file, which the second found gone when it wanted to rename it."""
    others = [StoreFolder.open]
    monkeypatch.setattr(os, "fsync", lambda fd: others.pop()(tmp_path) if others else None)
    StoreFolder.open(tmp_path)
    assert not others
    assert [path.name for path in tmp_path.iterdir()] == [MARKER_NAME]


def test_store_that_cannot_be_created_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        StoreFolder.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_store_that_may_only_be_read_is_no_place_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileConnector.open(limit_for(tmp_path, records=4), version(0), 0).close()
    make_read_only(monkeypatch)
    for change in (Path.touch, Path.unlink, lambda path: path.write_text(""), lambda path: path.rename(tmp_path / "x")):
        with pytest.raises(OSError, match="Read-only"):
            change(tmp_path / MARKER_NAME)
    with pytest.raises(ConfigError, match="cannot be used.*Read-only.*give a writable folder"):
        FileConnector.open(limit_for(tmp_path, records=4), version(0), 0)


def test_folder_without_marker_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no fastkv store"):
        StoreFolder.existing(tmp_path / "nothing")


def test_description_of_another_namespace_is_not_believed(tmp_path: Path) -> None:
    connector = FileConnector.open(limit_for(tmp_path, records=4), version(0), 0)
    path = tmp_path / version(0).digest.hex() / "namespace.json"
    path.write_bytes(version(1).to_json())
    with StoreFolder.existing(tmp_path).locked():
        assert StoreFolder.existing(tmp_path).namespaces()[0].description is None
    connector.close()
    FileConnector.open(limit_for(tmp_path, records=4), version(0), 0).close()
    assert StoreFolder.existing(tmp_path).namespaces()[0].description == version(0)  # opening repairs it
