"""The file backend in one process: what it keeps, what it gives up; deadlines, threads, ranks that share records."""

from __future__ import annotations

import os
import random
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.storage_cases import (
    MLA,
    digest,
    digests,
    file_bytes,
    get,
    pattern,
    patterns,
    put,
    store_config,
    toy_namespace,
)
from helpers.storage_faults import Fault, FaultyOps
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv.storage import open_connector, open_lookup
from fastkv.storage.base import NO_DEADLINE, Durability, GetOutcome, PutOutcome
from fastkv.storage.file import FileConnector
from fastkv.storage.file_config import FileStoreConfig
from fastkv.storage.file_reader import FileLookup, FileReader

NAMESPACE = toy_namespace()


def test_put_then_get_is_bit_equal(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    assert put(connector, 1, 2, 3) == ["stored"] * 3
    assert get(connector, 3, 9, 1, 2) == ["hit", "miss", "hit", "hit"]
    assert connector.counters() == {"put_stored": 3, "get_hit": 3, "get_miss": 1}
    connector.check_integrity()


@pytest.mark.parametrize("durability", Durability)
def test_reopened_store_with_the_same_config_hits_bit_equal(store: FileStoreConfig, durability: Durability) -> None:
    config = FileStoreConfig(store.path, store.max_bytes, durability=durability)
    connector = FileConnector.open(config, NAMESPACE, 0)
    put(connector, *range(6))
    connector.close()
    again = FileConnector.open(config, toy_namespace(), 0)
    assert len(again) == 6
    assert get(again, *range(7)) == ["hit"] * 6 + ["miss"]
    assert put(again, 0) == ["exists"]


def test_store_left_open_is_recovered_whole(store: FileStoreConfig, tmp_path: Path) -> None:
    """Nothing is saved only at close: a copy of the folder, taken while it is open, has every record."""
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, *range(5))
    copy = tmp_path / "copy"
    os.system(f"cp -r {store.path} {copy}")  # the lock is not copied: it is the kernel's
    again = FileConnector.open(FileStoreConfig(copy, store.max_bytes), NAMESPACE, 0)
    assert get(again, *range(5)) == ["hit"] * 5


@pytest.mark.parametrize("record_bytes", [1, 4095, 4096, 4097, 300_000])
def test_records_of_any_length_keep_their_neighbours_whole(tmp_path: Path, record_bytes: int) -> None:
    space = toy_namespace(record_bytes=record_bytes)
    connector = FileConnector.open(store_config(tmp_path / "store", space, records=5), space, 0)
    for name in range(5):
        put(connector, name)
    connector.remove([digest(2)])
    put(connector, "new")
    assert get(connector, 0, 1, "new", 3, 4) == ["hit"] * 5


def test_records_shorter_than_the_largest_keep_their_length(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    short = pattern("short", 100)
    assert connector.put(digests(1), [short], NO_DEADLINE) == (PutOutcome.STORED,)
    buffer = np.zeros(100, np.uint8)
    assert connector.get_into(digests(1), [buffer], NO_DEADLINE) == (GetOutcome.HIT,)
    np.testing.assert_array_equal(buffer, short)
    assert get(connector, 1) == ["miss"]
    assert connector.counters()["length_mismatch"] == 1


def test_two_io_threads_move_the_same_bytes(tmp_path: Path) -> None:
    space = toy_namespace(record_bytes=256 * 1024)
    connector = FileConnector.open(store_config(tmp_path / "store", space, records=7, io_threads=2), space, 0)
    assert put(connector, *range(7)) == ["stored"] * 7
    assert get(connector, *range(8)) == ["hit"] * 7 + ["miss"]


# the limit


def test_limit_is_never_passed_and_is_used(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    assert connector.capacity_records == 8
    for name in range(40):
        put(connector, name)
        assert len(connector) <= 8
        assert file_bytes(store.path) <= store.max_bytes
    assert len(connector) == 8
    assert connector.counters()["evictions"] == 32
    assert file_bytes(store.path) > store.max_bytes * 0.75
    connector.check_integrity()


def test_eviction_takes_the_least_recently_used(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    for name in range(8):
        put(connector, name)
    get(connector, 0)
    put(connector, 1)  # exists: a use, too
    put(connector, "a", "b")
    assert get(connector, *range(8)) == ["hit", "hit", "miss", "miss"] + ["hit"] * 4


def test_eviction_order_survives_close(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    for name in range(8):
        put(connector, name)
    get(connector, 0)
    connector.close()
    again = FileConnector.open(store, NAMESPACE, 0)
    put(again, "a", "b")
    assert get(again, 0, 1, 2, 3) == ["hit", "miss", "miss", "hit"]


def test_batch_larger_than_the_store_keeps_its_head(store: FileStoreConfig) -> None:
    """Ancestors come first, and a chain without its head is worth nothing."""
    connector = FileConnector.open(store, NAMESPACE, 0)
    assert put(connector, *range(10)) == ["stored"] * 8 + ["full"] * 2
    assert get(connector, *range(8)) == ["hit"] * 8
    connector.check_integrity()


def test_batch_does_not_evict_its_own_members(store: FileStoreConfig) -> None:
    """EXISTS is a promise: the record that was found must not make room for another of the same batch."""
    connector = FileConnector.open(store, NAMESPACE, 0)
    for name in range(8):
        put(connector, name)
    assert put(connector, "new", 0) == ["stored", "exists"]
    assert get(connector, "new", 0, 1) == ["hit", "hit", "miss"]


def test_digest_twice_in_a_batch_is_stored_once(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    assert put(connector, 1, 2, 1) == ["stored"] * 3
    assert len(connector) == 2
    connector.check_integrity()


def test_limit_lowered_between_runs_is_kept_at_once(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, *range(8))
    connector.close()
    smaller = store_config(store.path, NAMESPACE, records=3)
    again = FileConnector.open(smaller, NAMESPACE, 0)
    assert file_bytes(store.path) <= smaller.max_bytes
    assert len(again) == 3
    assert put(again, "a", "b", "c", "d") == ["stored"] * 3 + ["full"]
    again.check_integrity()


def test_limit_raised_between_runs_gives_room(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, *range(8))
    connector.close()
    again = FileConnector.open(store_config(store.path, NAMESPACE, records=20), NAMESPACE, 0)
    assert put(again, *range(8, 20)) == ["stored"] * 12
    assert get(again, *range(20)) == ["hit"] * 20
    again.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "remove", "reopen"]), st.lists(st.integers(0, 9), max_size=4)),
        max_size=25,
    )
)
@settings(max_examples=40, deadline=None)
def test_store_agrees_with_an_lru_dict(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]]
) -> None:
    """Any sequence of calls: exactly the records that an LRU dict would hold, in its order, seen by a lookup too."""
    config = store_config(tmp_path_factory.mktemp("lru") / "store", NAMESPACE, records=5)
    connector, lookup = FileConnector.open(config, NAMESPACE, 0), FileLookup(config.path, NAMESPACE)
    model: OrderedDict[int, None] = OrderedDict()
    for verb, listed in steps:
        names = list(dict.fromkeys(listed))
        if verb == "put":
            new = [name for name in names if name not in model]
            expected = ["exists" if name in model else "stored" for name in names]
            for name in new:
                victims = [old for old in model if old not in names]
                if len(model) >= 5:
                    del model[victims[0]]
                model[name] = None
            assert put(connector, *names) == expected
        elif verb == "get":
            assert get(connector, *names) == ["hit" if name in model else "miss" for name in names]
        elif verb == "remove":
            connector.remove(digests(*names))
            for name in names:
                model.pop(name, None)
        else:
            connector.close()
            connector = FileConnector.open(config, NAMESPACE, 0)
        if verb in ("put", "get"):
            for name in reversed(names):
                if name in model:
                    model.move_to_end(name)
        connector.check_integrity()
        assert len(connector) == len(model)
        for name in range(10):
            assert lookup.contains([digest(name)], NO_DEADLINE) == (name in model)
    assert file_bytes(config.path) <= config.max_bytes
    connector.close()
    lookup.close()


# deadlines


def test_deadline_in_the_past_moves_nothing(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, 1)
    past = time.monotonic() - 1
    assert get(connector, 1, 2, deadline_s=past) == ["timeout", "miss"]
    outcomes = connector.put(digests(5, 1), patterns([5, 1], connector.record_bytes), past)
    assert [outcome.value for outcome in outcomes] == ["timeout", "exists"]
    connector.check_integrity()
    assert put(connector, 5) == ["stored"]


def test_deadline_amid_a_slow_batch_keeps_what_was_done(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, *range(6))
    connector.close()
    slow = FileConnector.open(store, NAMESPACE, 0, FaultyOps(Fault.STALL, 0, num_calls=1000, stall_s=0.02))
    outcomes = get(slow, *range(6), deadline_s=time.monotonic() + 0.05)
    assert outcomes[0] == "hit"
    assert outcomes[-1] == "timeout"
    assert sorted(outcomes, key=["hit", "timeout"].index) == outcomes


# threads


def test_threads_on_one_connector_get_right_bytes_and_leave_it_consistent(store: FileStoreConfig) -> None:
    """Eviction, removal and reading of the same few slots at once: a slot being read is never given away."""
    connector = FileConnector.open(store, NAMESPACE, 0)
    outcomes: list[str] = []

    def client(seed: int) -> list[str]:
        dice, seen = random.Random(seed), []
        for _ in range(150):
            names = dice.sample(range(14), 3)
            verb = dice.random()
            if verb < 0.45:
                seen += put(connector, *names)
            elif verb < 0.9:
                seen += get(connector, *names)
            else:
                connector.remove(digests(*names))
        return seen

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(client, seed) for seed in range(4)]:
            outcomes += future.result()
    assert set(outcomes) == {"stored", "exists", "hit", "miss"}
    connector.check_integrity()
    connector.close()
    again = FileConnector.open(store, NAMESPACE, 0)
    assert get(again, *range(14)).count("hit") == len(again)


def test_close_waits_for_a_get_in_progress(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, 1)
    connector.close()
    slow = FileConnector.open(store, NAMESPACE, 0, FaultyOps(Fault.STALL, 0, num_calls=1000, stall_s=0.1))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(get, slow, 1)
        while not slow._table.num_pinned:
            time.sleep(0.001)
        slow.close()
        assert reading.result() == ["hit"]
    assert get(slow, 1) == ["unavailable"]


# replicated records


def test_replicated_ranks_share_one_record(tmp_path: Path) -> None:
    """MLA latents are the same on every rank: rank 0 stores them, the others read them, keys have no rank."""
    space = toy_namespace(MLA, tp_size=2)
    config = store_config(tmp_path / "store", space, records=4)
    reader = open_connector(config, space, 1)  # before there is a store at all
    assert get(reader, 1) == ["miss"]
    writer, lookup = open_connector(config, space, 0), open_lookup(config, space)
    assert put(reader, 1, 2) == ["delegated"] * 2
    assert put(writer, 1, 2) == ["stored"] * 2
    assert get(reader, 1, 2, 3) == ["hit", "hit", "miss"]
    assert lookup.contains(digests(1, 2, 3), NO_DEADLINE) == 2
    for name in range(10, 20):  # evicts, and reuses every slot
        put(writer, name)
    assert get(reader, 1, 2, 19) == ["miss", "miss", "hit"]
    writer.remove(digests(19))
    assert get(reader, 19) == ["miss"]
    assert reader.remove(digests(18))[0].value == "delegated"
    assert reader.flush()
    reader.close()
    assert get(reader, 18) == ["unavailable"]


def test_reader_whose_record_is_replaced_meanwhile_misses(tmp_path: Path) -> None:
    """It knows the old entry and reads the new payload: a miss by checksum, then by the entry that has changed."""
    space = toy_namespace(MLA, tp_size=2)
    config = store_config(tmp_path / "store", space, records=1)
    writer = open_connector(config, space, 0)
    put(writer, 1)

    class Replacing(FaultyOps):
        def read_into(self, fd: int, view: memoryview, offset: int) -> None:
            put(writer, 2)
            super().read_into(fd, view, offset)

    reader = FileReader(config.path, space, 1, Replacing(Fault.STALL, 1 << 30))
    assert get(reader, 1) == ["miss"]
    assert "checksum_errors" not in reader.counters()
