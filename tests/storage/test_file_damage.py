"""The file backend over files that hold something else than was stored: a counted miss, never a wrong byte."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.storage_cases import (
    get,
    put,
    store_config,
    toy_namespace,
)

from fastkv.storage.file import FileConnector
from fastkv.storage.file_config import FileStoreConfig

NAMESPACE = toy_namespace()


def segment_files(store: FileStoreConfig) -> list[Path]:
    return sorted(store.path.rglob("segment-*"))


def test_corrupt_payload_is_a_counted_miss_and_can_be_stored_again(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, 1, 2)
    with segment_files(store)[0].open("r+b") as file:
        file.seek(17)
        byte = file.read(1)
        file.seek(17)
        file.write(bytes([byte[0] ^ 1]))
    assert sorted(get(connector, 1, 2)) == ["corrupt", "hit"]
    assert sorted(get(connector, 1, 2)) == ["hit", "miss"]
    assert connector.counters()["checksum_errors"] == 1
    assert "slot" in connector.last_error()
    assert sorted(put(connector, 1, 2)) == ["exists", "stored"]
    assert get(connector, 1, 2) == ["hit", "hit"]


def test_half_a_segment_deleted_is_a_clean_miss_for_what_was_there(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, *range(8))
    connector.close()
    os.truncate(segment_files(store)[3], 2000)
    again = FileConnector.open(store, NAMESPACE, 0)
    outcomes = get(again, *range(8))
    assert outcomes.count("hit") == 3
    assert set(outcomes) == {"hit", "miss"}
    assert put(again, *range(8)).count("stored") == 5
    assert get(again, *range(8)) == ["hit"] * 8


def test_segment_vanishing_under_a_reader_is_a_miss_or_a_counted_failure(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, *range(8))
    os.truncate(segment_files(store)[0], 0)
    outcomes = get(connector, *range(8))
    assert outcomes.count("hit") == 7
    assert outcomes.count("failed") == 1
    assert connector.counters()["io_errors"] == 1


@pytest.mark.parametrize("damage", ["torn header", "foreign namespace", "empty", "garbage"])
def test_index_that_is_not_ours_starts_empty_and_counts(store: FileStoreConfig, damage: str) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, 1, 2)
    connector.close()
    (index,) = store.path.rglob("index")
    data = bytearray(index.read_bytes())
    if damage == "torn header":
        data[20] ^= 1
    elif damage == "foreign namespace":
        other = store_config(store.path.parent / "other", NAMESPACE, records=8)
        FileConnector.open(other, toy_namespace(block_size=4, model_dtype="float16"), 0).close()
        (foreign,) = other.path.rglob("index")
        data = bytearray(foreign.read_bytes())
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray(os.urandom(len(data)))
    index.write_bytes(data)
    again = FileConnector.open(store, NAMESPACE, 0)
    assert get(again, 1, 2) == ["miss", "miss"]
    assert again.counters()["resets"] == 1
    assert put(again, 1, 2) == ["stored", "stored"]
    assert get(again, 1, 2) == ["hit", "hit"]


def test_entry_torn_at_every_byte_is_a_miss_or_the_whole_record(store: FileStoreConfig) -> None:
    connector = FileConnector.open(store, NAMESPACE, 0)
    put(connector, 1)
    connector.close()
    (index,) = store.path.rglob("index")
    data = index.read_bytes()
    at = next(slot for slot in range(4096, len(data), 64) if any(data[slot : slot + 64]))
    for cut in range(64):
        torn = bytearray(data)
        torn[at + cut : at + 64] = bytes(64 - cut)
        if torn == data:
            continue
        index.write_bytes(torn)
        again = FileConnector.open(store, NAMESPACE, 0)
        assert get(again, 1) == ["miss"]
        again.close()
