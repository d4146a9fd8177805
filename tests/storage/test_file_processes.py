"""The file backend over several processes, some of which are killed."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from helpers.storage_cases import MLA, digests, get, put, store_config, toy_namespace
from helpers.storage_process import run_role, start_role

from fastkv.errors import StorageError
from fastkv.storage import open_connector, open_lookup
from fastkv.storage.base import NO_DEADLINE, deadline_in
from fastkv.storage.file import FileConnector


def test_records_go_through_another_process_bit_equal(tmp_path: Path) -> None:
    space = toy_namespace()
    connector = FileConnector.open(store_config(tmp_path, space, records=16), space, 0)
    put(connector, *range(6))
    connector.close()
    assert run_role("get", tmp_path, records=16, rank=0, names=[*range(7)])["outcomes"] == ["hit"] * 6 + ["miss"]
    assert run_role("put", tmp_path, records=16, rank=0, names=[10, 11])["outcomes"] == ["stored"] * 2
    again = FileConnector.open(store_config(tmp_path, space, records=16), space, 0)
    assert get(again, 10, 11, 0) == ["hit"] * 3


def test_acknowledged_records_survive_the_process_that_stored_them(tmp_path: Path) -> None:
    """The writer kills itself right after the answer of its put."""
    process = start_role("put", tmp_path, records=16, rank=0, names=[1, 2, 3], killed=True)
    answer, _ = process.communicate(timeout=60)
    assert process.returncode == -9
    assert json.loads(answer)["outcomes"] == ["stored"] * 3
    space = toy_namespace()
    assert get(FileConnector.open(store_config(tmp_path, space, records=16), space, 0), 1, 2, 3) == ["hit"] * 3


@pytest.mark.parametrize(
    ("evict", "rounds", "records", "record_bytes"), [(False, 25, 40_000, 4096), (True, 25, 24, 256 * 1024)]
)
def test_writer_killed_amid_writing_loses_nothing_acknowledged_and_tears_nothing(
    fast_path: Path, evict: bool, rounds: int, records: int, record_bytes: int
) -> None:
    """50 kills: 25 of a growing store of small records, 25 of a full store of large ones that evicts all the time."""
    report = run_role(
        "kill", fast_path, records=records, record_bytes=record_bytes, rounds=rounds, evict=evict, seed=rounds
    )
    assert report["rounds"] == rounds
    assert report["lost"] == 0
    assert report["torn"] == 0
    assert report["resets"] == 0
    assert report["acknowledged"] > 3 * rounds


def test_second_process_is_refused_and_told_who_writes(tmp_path: Path) -> None:
    space = toy_namespace()
    config = store_config(tmp_path, space, records=16)
    holder = start_role("hold", tmp_path, records=16, rank=0)
    assert holder.stdout is not None
    pid = json.loads(holder.stdout.readline())["pid"]
    with pytest.raises(StorageError, match=rf"process {pid}\b"):
        FileConnector.open(config, space, 0)
    holder.kill()
    holder.communicate(timeout=60)
    assert put(FileConnector.open(config, space, 0), 1) == ["stored"]  # the kernel let go of the lock


def test_lookup_finds_what_all_ranks_of_other_processes_have(tmp_path: Path) -> None:
    space = toy_namespace(tp_size=2)
    config = store_config(tmp_path, space, records=16)
    lookup = open_lookup(config, space)
    assert lookup.contains(digests(0), NO_DEADLINE) == 0
    run_role("put", tmp_path, records=16, tp_size=2, rank=0, names=[0, 1, 2, 3])
    assert lookup.contains(digests(0), NO_DEADLINE) == 0
    run_role("put", tmp_path, records=16, tp_size=2, rank=1, names=[0, 1, 3])
    assert lookup.contains(digests(0, 1, 2, 3), NO_DEADLINE) == 2
    assert run_role("lookup", tmp_path, records=16, tp_size=2, names=[0, 1, 2])["leading"] == 2


def test_lookup_loses_a_rank_that_was_deleted(tmp_path: Path) -> None:
    """Half an object is no object: one rank's files are gone, so is every block."""
    space = toy_namespace(tp_size=2)
    config = store_config(tmp_path, space, records=16)
    ranks = [open_connector(config, space, rank) for rank in (0, 1)]
    lookup = open_lookup(config, space)
    for rank in ranks:
        put(rank, 0, 1)
    assert lookup.contains(digests(0, 1), NO_DEADLINE) == 2
    ranks[1].close()
    (folder,) = tmp_path.glob("*/rank-1")
    shutil.rmtree(folder)
    assert lookup.contains(digests(0, 1), NO_DEADLINE) == 0
    fresh = open_connector(config, space, 1)
    assert lookup.contains(digests(0, 1), NO_DEADLINE) == 0
    put(fresh, 0)
    assert lookup.contains(digests(0, 1), NO_DEADLINE) == 1


def test_lookup_follows_eviction_removal_and_reopening(tmp_path: Path) -> None:
    space = toy_namespace()
    config = store_config(tmp_path, space, records=4)
    connector, lookup = open_connector(config, space, 0), open_lookup(config, space)
    put(connector, *range(4))
    assert lookup.contains(digests(*range(4)), NO_DEADLINE) == 4
    put(connector, 4)  # evicts 3, the tail of its batch
    assert lookup.contains(digests(*range(4)), NO_DEADLINE) == 3
    connector.remove(digests(1))
    assert lookup.contains(digests(*range(4)), NO_DEADLINE) == 1
    connector.close()
    connector = open_connector(store_config(tmp_path, space, records=2), space, 0)
    left = [name for name in range(5) if get(connector, name) == ["hit"]]
    assert [name for name in range(5) if lookup.contains(digests(name), NO_DEADLINE)] == left


def test_lookup_stops_at_its_deadline(tmp_path: Path) -> None:
    space = toy_namespace()
    config = store_config(tmp_path, space, records=4)
    put(open_connector(config, space, 0), 0)
    lookup = open_lookup(config, space)
    assert lookup.contains(digests(0), time.monotonic() - 1) == 0
    assert lookup.counters()["lookup_timeout"] == 1
    assert lookup.contains(digests(0), deadline_in(5)) == 1
    lookup.close()
    assert lookup.contains(digests(0), deadline_in(5)) == 0


def test_replicated_rank_reads_from_another_process(tmp_path: Path) -> None:
    space = toy_namespace(MLA, tp_size=2)
    writer = open_connector(store_config(tmp_path, space, records=8), space, 0)
    put(writer, 1, 2)
    answer = run_role("get", tmp_path, records=8, tp_size=2, mla=True, rank=1, names=[1, 2, 3])
    assert answer["outcomes"] == ["hit", "hit", "miss"]


def test_namespaces_on_one_folder_never_see_each_other(tmp_path: Path) -> None:
    """The kind "storage keys": stores that differ in one thing miss; the identical one hits after a restart."""
    base = toy_namespace()
    others = [
        toy_namespace(block_size=8),
        toy_namespace(model_dtype="float16"),
        toy_namespace(kv_cache_quant_type="block_wise_fp8"),
        toy_namespace(tp_size=2),
        base.with_weights_version("next"),
    ]
    limit = 4 << 20

    def open_one(space: object) -> FileConnector:
        config = store_config(tmp_path, base, records=4)
        return FileConnector.open(type(config)(config.path, limit), space, 0)  # type: ignore[arg-type]

    connector = open_one(base)
    put(connector, 1)
    for space in others:
        other = open_one(space)
        assert get(other, 1) == ["miss"]
        put(other, 1)
        other.close()
    connector.close()
    for space in (base, *others):
        again = open_one(space)
        assert get(again, 1) == ["hit"]
        again.close()


def test_child_forked_while_the_store_is_open_does_not_keep_the_lock(tmp_path: Path) -> None:
    space = toy_namespace()
    config = store_config(tmp_path, space, records=4)
    connector = FileConnector.open(config, space, 0)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        connector.close()
        FileConnector.open(config, space, 0).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
