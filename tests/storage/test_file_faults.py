"""The file backend on a disk that fails: every system call of a scenario goes wrong once, in every way.

After each fault: nothing is raised on the request path, no wrong byte is given out, the table is consistent, the fault
is counted, and the store works again as soon as the disk does.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.storage_cases import MLA, digests, file_bytes, get, patterns, put, store_config, toy_namespace
from helpers.storage_faults import Fault, FaultyOps

from fastkv.errors import ConfigError, StorageError
from fastkv.storage.base import NO_DEADLINE, Durability, deadline_in
from fastkv.storage.file import FileConnector
from fastkv.storage.file_config import FileStoreConfig
from fastkv.storage.file_reader import FileLookup, FileReader
from fastkv.storage.fileops import FileOps

NAMESPACE = toy_namespace()


def scenario(config: FileStoreConfig, ops: FaultyOps) -> set[int]:
    """Open, fill past the limit, read, remove, flush, close, reopen, read. Names acknowledged and never given up."""
    try:
        connector = FileConnector.open(config, NAMESPACE, 0, ops)
    except StorageError:
        return set()
    acknowledged: set[int] = set()
    for names in ((0, 1), (2, 3), (4, 5)):  # four fit
        acknowledged |= {
            name for name, outcome in zip(names, put(connector, *names), strict=True) if outcome == "stored"
        }
        connector.check_integrity()
    get(connector, 2, 3)
    connector.check_integrity()
    put(connector, 6)
    connector.remove(digests(4, 6))
    connector.check_integrity()
    connector.flush()
    connector.close()
    return acknowledged & {2, 3}


def test_records_that_cannot_be_synced_are_not_passed_off_as_safe_from_a_power_loss(tmp_path: Path) -> None:
    """An earlier process stored them without syncing; a put of the same would have been EXISTS, which means synced."""
    config = store_config(tmp_path, NAMESPACE, records=4)
    with closing(FileConnector.open(config, NAMESPACE, 0)) as connector:
        assert put(connector, 1) == ["stored"]

    class Broken(FileOps):
        def sync(self, fd: int) -> None:
            raise OSError(errno.EIO, "on purpose")

    safe = replace(config, durability=Durability.DISK)
    with pytest.raises(StorageError, match="cannot be synced.*on purpose"):
        FileConnector.open(safe, NAMESPACE, 0, Broken())
    with closing(FileConnector.open(safe, NAMESPACE, 0)) as connector:  # it let go of the store
        assert put(connector, 1) == ["exists"]


@pytest.mark.parametrize(
    ("fault", "durability"),
    [
        (Fault.FAIL, Durability.PROCESS),
        (Fault.FAIL, Durability.DISK),
        (Fault.FULL, Durability.PROCESS),
        (Fault.CORRUPT, Durability.PROCESS),
        (Fault.STALL, Durability.PROCESS),
    ],
)
def test_fault_at_every_call_costs_misses_and_nothing_else(
    fast_path: Path, fault: Fault, durability: Durability
) -> None:
    num_calls = 0
    while True:
        config = store_config(fast_path / str(num_calls), NAMESPACE, records=4, durability=durability)
        ops = FaultyOps(fault, num_calls, stall_s=0.001)
        acknowledged = scenario(config, ops)
        assert file_bytes(config.path) <= config.max_bytes
        healthy = FileConnector.open(config, NAMESPACE, 0)
        found = get(healthy, *range(7))  # compares every byte of a hit
        if not ops.trigger.has_come or fault is Fault.STALL:
            assert [found[name] for name in sorted(acknowledged)] == ["hit"] * len(acknowledged)
        healthy.remove(digests(*range(7)))
        assert put(healthy, *range(4)) == ["stored"] * 4
        assert get(healthy, *range(4)) == ["hit"] * 4
        healthy.check_integrity()
        healthy.close()
        if not ops.trigger.has_come:
            break
        num_calls += 1
    assert num_calls > 30  # the scenario really went through its calls


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FULL])
def test_disk_that_stays_broken_is_counted_and_heals(
    tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastkv.storage.file._GROWTH_RETRY_S", 0.0)
    config = store_config(tmp_path / "store", NAMESPACE, records=8)
    ops = FaultyOps(fault, 1 << 30)
    connector = FileConnector.open(config, NAMESPACE, 0, ops)
    put(connector, 0, 1)
    ops.trigger._faulty = range(ops.trigger.num_calls, 1 << 30)
    assert set(put(connector, 2, 3)) <= {"failed", "full"}
    assert set(get(connector, 0, 1)) == {"failed"}
    assert connector.remove(digests(1))[0].value == "failed"
    assert not connector.flush()
    counters = connector.counters()
    assert counters["io_errors"] >= 3
    assert counters["flush_failed"] == 1
    assert "injected" in connector.last_error()
    ops.trigger._faulty = range(0)
    assert put(connector, 1, 2, 3) == ["stored"] * 3
    assert get(connector, 0, 1, 2, 3) == ["hit"] * 4
    assert connector.flush()
    connector.check_integrity()


def test_flush_that_failed_is_due_again(tmp_path: Path) -> None:
    """A sync error must not make the next flush believe that there is nothing left to do."""
    synced: list[int] = []

    class Watching(FaultyOps):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            synced.append(fd)

    ops = Watching(Fault.FAIL, 1 << 30)
    connector = FileConnector.open(store_config(tmp_path / "store", NAMESPACE, records=8), NAMESPACE, 0, ops)
    put(connector, 0)
    ops.trigger._faulty = range(ops.trigger.num_calls, ops.trigger.num_calls + 1)
    assert not connector.flush()
    assert synced == []
    assert connector.flush()
    assert len(synced) == 2  # the segment and the index
    assert connector.flush()
    assert len(synced) == 3  # the index alone


def test_lookup_and_reader_on_a_broken_disk_find_nothing_and_heal(tmp_path: Path) -> None:
    space = toy_namespace(MLA, tp_size=2)
    config = store_config(tmp_path / "store", space, records=4)
    writer = FileConnector.open(config, space, 0)
    put(writer, 0, 1)
    for call in range(6):
        ops = FaultyOps(Fault.FAIL, call)
        lookup, reader = FileLookup(config.path, space, ops), FileReader(config.path, space, 1, ops)
        assert lookup.contains(digests(0, 1), NO_DEADLINE) in (0, 2)
        assert set(get(reader, 0, 1)) <= {"failed", "hit"}
        assert lookup.contains(digests(0, 1), NO_DEADLINE) == 2
        assert get(reader, 0, 1) == ["hit", "hit"]
        assert lookup.counters().get("io_errors", 0) + reader.counters().get("io_errors", 0) == 1


# a full disk, for real


def fill_up(config: FileStoreConfig) -> None:
    """A store whose limit is larger than the disk: it lives on what the disk gives, and never raises."""
    connector = FileConnector.open(config, NAMESPACE, 0)
    for first in range(0, 600, 20):
        outcomes = put(connector, *range(first, first + 20))
        assert set(outcomes) <= {"stored", "full"}
        connector.check_integrity()
    assert connector.counters()["growth_refused"] >= 1
    assert connector.counters()["evictions"] > 0
    assert get(connector, *range(580, 600)) == ["hit"] * 20
    assert connector.flush()
    connector.close()
    again = FileConnector.open(config, NAMESPACE, 0)
    assert get(again, *range(580, 600)) == ["hit"] * 20
    again.close()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting needs root; the file size limit below stands in for it")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_of_a_small_tmpfs_is_lived_with(small_tmpfs: Path) -> None:
    fill_up(FileStoreConfig(small_tmpfs / "store", 64 << 20, segment_bytes=128 << 10))


def test_disk_full_from_the_start_is_a_clear_error_and_nothing_worse(small_tmpfs: Path) -> None:
    with (small_tmpfs / "ballast").open("wb") as ballast:
        free = os.statvfs(small_tmpfs).f_bavail * 4096
        os.posix_fallocate(ballast.fileno(), 0, free)
    with pytest.raises(StorageError, match="No space left"):
        FileConnector.open(FileStoreConfig(small_tmpfs / "store", 64 << 20), NAMESPACE, 0)
    (small_tmpfs / "ballast").unlink()
    connector = FileConnector.open(FileStoreConfig(small_tmpfs / "store", 64 << 20), NAMESPACE, 0)
    assert put(connector, 1) == ["stored"]


def test_file_size_limit_of_the_process_is_lived_with(tmp_path: Path) -> None:
    """The same through RLIMIT_FSIZE (EFBIG), which works everywhere: segments beyond it cannot be allocated."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        connector = FileConnector.open(
            FileStoreConfig(tmp_path / "store", 64 << 20, segment_bytes=128 << 10), NAMESPACE, 0
        )
        names = range(40)  # 16 slots of 4 KiB fit into the one file that may be 64 KiB long
        assert put(connector, *names) == ["stored"] * 16 + ["full"] * 24
        assert "growth_refused" in connector.last_error()
        assert get(connector, *names) == ["hit"] * 16 + ["miss"] * 24
        connector.check_integrity()
        connector.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_folder_that_may_not_be_written_is_refused_at_opening(tmp_path: Path) -> None:
    class ReadOnly(FileOps):
        def open(self, path: Path, *, create: bool = False, writable: bool = True) -> int:
            if writable:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return super().open(path, create=create, writable=writable)

    config = store_config(tmp_path / "store", NAMESPACE, records=4)
    with pytest.raises(ConfigError, match=r"storage\.path.*writable folder"):
        FileConnector.open(config, NAMESPACE, 0, ReadOnly())
    assert put(FileConnector.open(config, NAMESPACE, 0), 1) == ["stored"]  # the lock was given back


def test_folder_that_may_not_be_written_later_is_an_outcome(tmp_path: Path) -> None:
    class NoNewFiles(FileOps):
        def open(self, path: Path, *, create: bool = False, writable: bool = True) -> int:
            if create and path.name.startswith("segment"):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return super().open(path, create=create, writable=writable)

    connector = FileConnector.open(store_config(tmp_path / "store", NAMESPACE, records=4), NAMESPACE, 0, NoNewFiles())
    outcomes = connector.put(digests(1), patterns([1], connector.record_bytes), deadline_in(1))
    assert [outcome.value for outcome in outcomes] == ["full"]
    assert "Permission denied" in connector.last_error()
