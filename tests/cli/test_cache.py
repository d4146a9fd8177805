"""`fastkv cache`: what it shows, what it refuses, what it deletes."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.storage_cases import digest, get, put, store_config, toy_namespace
from helpers.storage_faults import make_read_only

from fastkv.cli import cache
from fastkv.errors import ConfigError, StorageError
from fastkv.storage import FileConnector
from fastkv.storage.folder import StoreFolder
from fastkv.storage.survey import survey_namespace, verify_rank

SPACE = toy_namespace(tp_size=2)
OTHER = SPACE.with_weights_version("v2")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two ranks with blocks 0-3 and 0-2, and a second namespace with one record of one rank."""
    path = tmp_path / "store"
    config = store_config(path, SPACE, records=32)
    for space, rank, names in ((SPACE, 0, range(4)), (SPACE, 1, range(3)), (OTHER, 0, range(1))):
        connector = FileConnector.open(config, space, rank)
        put(connector, *names)
        connector.close()
    os.utime(path / SPACE.digest.hex() / "namespace.json", (1000, 1000))
    return path


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    cache.add_parser(parser.add_subparsers())
    args = parser.parse_args(["cache", *map(str, words)])
    return int(args.run(args))


def run_json(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    run(*words, "--json")
    return json.loads(capsys.readouterr().out)


def corrupt_a_record(store: Path) -> None:
    segment = next((store / SPACE.digest.hex() / "rank-0").glob("segment-*"))
    with segment.open("r+b") as file:
        file.write(b"\xff" * 8)


def test_ls_lists_namespaces_with_what_they_are(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", store) == 0
    out = capsys.readouterr().out
    for word in (SPACE.digest.hex()[:12], OTHER.digest.hex()[:12], "toy", "v2", "bfloat16"):
        assert word in out


def test_ls_json_counts_blocks_that_all_ranks_have(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "ls", store)
    assert report["file_bytes"] == sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    first, second = report["namespaces"]
    assert first["namespace"] == SPACE.digest.hex()
    assert first["description"]["model"] == "toy"
    assert (first["complete_blocks"], first["records"]) == (3, 7)
    assert first["payload_bytes"] == 7 * SPACE.record_bytes
    assert first["in_use_by"] == []
    assert (second["complete_blocks"], second["records"]) == (0, 1)
    assert "ranks" not in first


def test_stat_shows_each_rank(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "stat", store, "--namespace", SPACE.digest.hex()[:6])
    (only,) = report["namespaces"]
    assert [(rank["rank"], rank["records"], rank["torn_entries"]) for rank in only["ranks"]] == [(0, 4, 0), (1, 3, 0)]
    assert run("stat", store) == 0
    assert "blocks that all ranks have: 3" in capsys.readouterr().out


def test_ls_of_a_store_in_use_names_the_process(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    connector = FileConnector.open(store_config(store, SPACE, records=32), SPACE, 1)
    in_use = {row["namespace"]: row["in_use_by"] for row in run_json(capsys, "ls", store)["namespaces"]}
    assert in_use == {SPACE.digest.hex(): [os.getpid()], OTHER.digest.hex(): []}
    assert put(connector, 9) == ["stored"]


def test_verify_of_an_intact_store_is_silent_success(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", store) == 0
    assert "intact" in capsys.readouterr().out


def test_verify_finds_a_corrupt_record_and_changes_nothing(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corrupt_a_record(store)
    for _ in range(2):
        assert run("verify", store, "--json") == 1
        report = json.loads(capsys.readouterr().out)
        assert not report["is_intact"]
        counts = [(row["rank"], row["good"], len(row["corrupt"])) for row in report["ranks"]]
        assert sorted(counts) == [(0, 1, 0), (0, 3, 1), (1, 3, 0)]
    (bad,) = (digest for row in report["ranks"] for digest in row["corrupt"])
    assert bad in {digest(name).hex() for name in range(4)}
    assert run("verify", store) == 1
    assert f"corrupt: {bad}" in capsys.readouterr().out


def test_verify_of_a_truncated_segment_reports_it(store: Path) -> None:
    segment = next((store / OTHER.digest.hex() / "rank-0").glob("segment-*"))
    os.truncate(segment, 10)
    assert run("verify", store, "--namespace", OTHER.digest.hex()) == 1


def test_verify_beside_a_writer_that_replaces_everything_finds_nothing_corrupt(tmp_path: Path) -> None:
    """The records that were listed are gone when they are read: changed, not corrupt."""
    config = store_config(tmp_path, SPACE, records=4)
    connector = FileConnector.open(config, SPACE, 0)
    put(connector, *range(4))
    store = StoreFolder.existing(tmp_path)
    with store.locked():
        (survey,) = map(survey_namespace, store.namespaces())
    put(connector, *range(10, 13))
    result = verify_rank(survey.ranks[0])
    assert (result.good, result.changed, result.corrupt) == (1, 3, ())
    assert get(connector, *range(10, 13)) == ["hit"] * 3


def test_store_that_may_only_be_read_can_be_looked_at(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot, a mount or another user's store: ls wanted to write into its lock."""
    make_read_only(monkeypatch)
    for verb in ("ls", "stat", "verify"):
        assert run(verb, store) == 0
    assert capsys.readouterr().out.endswith("intact\n")
    with pytest.raises(StorageError, match="cannot be cleared.*Read-only"):
        run("clear", store, "--yes")


def test_clear_without_yes_deletes_nothing(store: Path) -> None:
    with pytest.raises(ConfigError, match="--yes"):
        run("clear", store)
    assert len(list(store.glob("*/rank-*"))) == 3


def test_clear_of_one_namespace_keeps_the_other(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clear", store, "--yes", "--namespace", OTHER.digest.hex()[:8]) == 0
    assert "deleted 1 namespaces" in capsys.readouterr().out
    assert [path.name for path in store.iterdir() if path.is_dir()] == [SPACE.digest.hex()]
    again = FileConnector.open(store_config(store, SPACE, records=32), SPACE, 0)
    assert get(again, *range(4)) == ["hit"] * 4


def test_clear_of_everything_leaves_an_empty_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "clear", store, "--yes")
    assert sorted(report["deleted"]) == sorted([SPACE.digest.hex(), OTHER.digest.hex()])
    assert report["freed_bytes"] > 0
    assert run_json(capsys, "ls", store)["namespaces"] == []


def test_clear_refuses_all_if_one_is_in_use(store: Path) -> None:
    connector = FileConnector.open(store_config(store, SPACE, records=32), OTHER, 0)
    with pytest.raises(StorageError, match=f"process {os.getpid()}"):
        run("clear", store, "--yes")
    assert len(list(store.glob("*/rank-*"))) == 3
    assert get(connector, 0) == ["hit"]


def test_namespace_that_is_unknown_or_ambiguous_is_refused(store: Path) -> None:
    for wanted in ("zz", ""):
        with pytest.raises(ConfigError, match=f"no namespace.*{SPACE.digest.hex()[:12]}"):
            run("ls", store, "--namespace", wanted)


def test_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    for verb in ("ls", "stat", "verify", "clear"):
        with pytest.raises(ConfigError, match="no fastkv store"):
            run(verb, tmp_path)


def test_description_that_is_lost_leaves_the_namespace_usable(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / SPACE.digest.hex() / "namespace.json").write_text("{")
    rows = {row["namespace"]: row for row in run_json(capsys, "ls", store)["namespaces"]}
    row = rows[SPACE.digest.hex()]
    assert (row["description"], row["complete_blocks"], row["records"]) == (None, None, 7)
    assert run("ls", store) == 0
    assert "unknown" in capsys.readouterr().out
    assert run("verify", store) == 0
