"""`fastkv cache`: what is in a storage folder, is it intact, and away with it.

Owns the command's flags and what it shows: tables or JSON on stdout, a progress bar on stderr. Reading the store is
fastkv.storage.survey, deleting is fastkv.storage.folder. Safe beside running engines: ls, stat and verify change
nothing, clear refuses what a process has open for writing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from fastkv.cli.options import format_bytes
from fastkv.errors import ConfigError, StorageError
from fastkv.storage.folder import NamespaceFolder, StoreFolder
from fastkv.storage.survey import NamespaceSurvey, VerifyResult, survey_namespace, verify_rank

_SHORT = 12  # hex digits of a namespace that people see and type


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `cache` to the command's subparsers (what ArgumentParser.add_subparsers returned)."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "cache",
        help="look into, verify or clear a storage folder",
        description="Look into a storage folder (storage.path of a config). A namespace is one model with one way of "
        "storing its cache; engines share records only within one.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in (
        ("ls", "list the namespaces"),
        ("stat", "totals, and each rank's records and bytes"),
        ("verify", "read every record and compare its checksum; exit code 1 if one does not match"),
        ("clear", "delete namespaces; refuses those in use"),
    ):
        command = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("store", metavar="STORE_DIR", help="the folder in storage.path")
        command.add_argument("--namespace", metavar="HEX", help="only this one; its first digits are enough")
        command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        if verb == "clear":
            command.add_argument("--yes", action="store_true", help="really delete")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out `fastkv cache`.

    Raises:
        ConfigError: no store there, no such namespace, clear without --yes.
        StorageError: what is to be deleted is in use, or the disk failed.
    """
    store = StoreFolder.existing(Path(args.store))
    try:
        if args.verb == "clear":
            return _clear(store, args)
        with store.locked():
            folders = _selected(store, args.namespace)
        surveys = [survey_namespace(folder) for folder in folders]
        if args.verb == "verify":
            return _verify(store, surveys, args.json)
        _show(store, surveys, args)
    except OSError as error:
        what = "cleared" if args.verb == "clear" else "read"
        raise StorageError(f"store {store.root} cannot be {what}: {error}", level="storage") from error
    return 0


def _selected(store: StoreFolder, wanted: str | None) -> list[NamespaceFolder]:
    """The namespaces that are asked for: all, or the one whose name starts with wanted."""
    folders = store.namespaces()
    if wanted is None:
        return folders
    found = [folder for folder in folders if wanted and folder.digest.hex().startswith(wanted.lower())]
    if len(found) != 1:
        names = ", ".join(folder.digest.hex()[:_SHORT] for folder in folders) or "none"
        problem = "names more than one namespace" if found else "names no namespace"
        raise ConfigError(f"--namespace {wanted!r} {problem} of {store.root}; it has: {names}")
    return found


def _show(store: StoreFolder, surveys: Sequence[NamespaceSurvey], args: argparse.Namespace) -> None:
    report = {
        "store": str(store.root),
        "file_bytes": store.used_bytes(),
        "namespaces": [_row(survey, with_ranks=args.verb == "stat") for survey in surveys],
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)  # a pipe has no width: nothing is cut short in it
    if args.verb == "ls":
        console.print(_ls_table(surveys))
        return
    console.print(f"{store.root}: {format_bytes(store.used_bytes())} in {len(surveys)} namespaces")
    for survey in surveys:
        _print_stat(console, survey)


def _row(survey: NamespaceSurvey, *, with_ranks: bool) -> dict[str, Any]:
    """A namespace for JSON: sizes in bytes, times in Unix seconds, null for what is unknown."""
    folder = survey.folder
    row: dict[str, Any] = {
        "namespace": folder.digest.hex(),
        "description": json.loads(folder.description.to_json()) if folder.description else None,
        "complete_blocks": survey.num_complete,
        "records": survey.num_records,
        "payload_bytes": sum(rank.payload_bytes for rank in survey.ranks),
        "file_bytes": folder.file_bytes,
        "last_used_s": folder.last_used_s,
        "in_use_by": [int(pid) if pid.isdigit() else None for pid in folder.writer_pids],
    }
    if with_ranks:
        row["ranks"] = [
            {
                "rank": rank.folder.rank,
                "is_readable": rank.identity is not None,
                "records": len(rank.records),
                "slots": rank.num_slots,
                "torn_entries": rank.num_torn,
                "payload_bytes": rank.payload_bytes,
                "file_bytes": rank.folder.file_bytes,
            }
            for rank in survey.ranks
        ]
    return row


def _ls_table(surveys: Sequence[NamespaceSurvey]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("namespace", no_wrap=True)
    table.add_column("model", overflow="fold", min_width=8)
    table.add_column("weights", overflow="fold", min_width=7)
    table.add_column("storage", no_wrap=True)
    for name in ("TP", "blocks", "size", "used", "by pid"):
        table.add_column(name, justify="right", no_wrap=True)
    for survey in surveys:
        folder, about = survey.folder, survey.folder.description
        table.add_row(
            folder.digest.hex()[:_SHORT],
            about.model if about else "unknown",
            (about.weights_version or "-") if about else "?",
            _storage(about.quant_type, about.storage_dtype) if about else "?",
            str(about.tp_size) if about else "?",
            "?" if survey.num_complete is None else str(survey.num_complete),
            format_bytes(folder.file_bytes),
            _age(time.time() - folder.last_used_s),
            ", ".join(folder.writer_pids) or "-",
        )
    return table


def _print_stat(console: Console, survey: NamespaceSurvey) -> None:
    about = survey.folder.description
    title = f"{survey.folder.digest.hex()[:_SHORT]}  {about.model if about else 'unknown'}"
    if about:
        layers = ", ".join(f"{group.name} {group.num_layers} {group.attention} layers" for group in about.groups)
        title += f"  {layers}, {_storage(about.quant_type, about.storage_dtype)}, {about.block_size} tokens a block"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("rank", "records", "slots", "torn", "payload", "files", "in use by"):
        table.add_column(name, justify="right")
    for rank in survey.ranks:
        table.add_row(
            str(rank.folder.rank),
            str(len(rank.records)) if rank.identity else "no index",
            str(rank.num_slots),
            str(rank.num_torn),
            format_bytes(rank.payload_bytes),
            format_bytes(rank.folder.file_bytes),
            rank.folder.writer_pid or "-",
        )
    console.print(table)
    if survey.num_complete is not None:
        console.print(f"blocks that all ranks have: {survey.num_complete}")


def _verify(store: StoreFolder, surveys: Sequence[NamespaceSurvey], as_json: bool) -> int:
    ranks = [(survey, rank) for survey in surveys for rank in survey.ranks]
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    results: list[VerifyResult] = []
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("verify", total=sum(rank.payload_bytes for _, rank in ranks))
        for _, rank in ranks:
            results.append(verify_rank(rank, lambda nbytes: progress.advance(task, nbytes)))
    rows: list[dict[str, Any]] = [
        {
            "namespace": survey.folder.digest.hex(),
            "rank": rank.folder.rank,
            "good": result.good,
            "changed": result.changed,
            "corrupt": [record.digest.hex() for record in result.corrupt],
            "torn_entries": rank.num_torn,
        }
        for (survey, rank), result in zip(ranks, results, strict=True)
    ]
    num_corrupt = sum(len(result.corrupt) for result in results)
    if as_json:
        print(json.dumps({"store": str(store.root), "is_intact": num_corrupt == 0, "ranks": rows}, indent=2))
    else:
        for row in rows:
            print(
                f"{row['namespace'][:_SHORT]} rank {row['rank']}: {row['good']} good, {row['changed']} changed "
                f"meanwhile, {len(row['corrupt'])} corrupt, {row['torn_entries']} torn entries"
            )
            for digest in row["corrupt"]:
                print(f"  corrupt: {digest}")
        print("intact" if num_corrupt == 0 else f"{num_corrupt} corrupt records; reading one is a miss and drops it")
    return 1 if num_corrupt else 0


def _clear(store: StoreFolder, args: argparse.Namespace) -> int:
    with store.locked():
        folders = _selected(store, args.namespace)
        names = ", ".join(folder.digest.hex()[:_SHORT] for folder in folders) or "nothing"
        if not args.yes:
            raise ConfigError(f"this would delete {names} in {store.root}; add --yes to do it")
        for folder in folders:  # all or nothing: refuse before the first one is gone
            if folder.writer_pids:
                raise StorageError(
                    f"namespace {folder.digest.hex()[:_SHORT]} is open for writing by process "
                    f"{', '.join(folder.writer_pids)}; stop it first",
                    level="storage",
                )
        for folder in folders:
            store.delete(folder)
    freed = sum(folder.file_bytes for folder in folders)
    if args.json:
        deleted = [folder.digest.hex() for folder in folders]
        print(json.dumps({"store": str(store.root), "deleted": deleted, "freed_bytes": freed}, indent=2))
    else:
        print(f"deleted {len(folders)} namespaces, {format_bytes(freed)}")
    return 0


def _storage(quant_type: str, storage_dtype: str) -> str:
    return storage_dtype if quant_type == "none" else quant_type


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
