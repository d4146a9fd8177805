"""Roles that other processes play in storage tests. Run as a script: one JSON object on stdin, one on stdout.

    {"role": "put" | "get" | "lookup" | "hold" | "kill", "path": ..., "records": ..., ...}

Runs without pytest, so that it starts fast and has one thread when it forks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
sys.path[:0] = [str(HELPERS.parent)]

from helpers.storage_cases import GQA, MLA, digests, get, pattern, put, store_config, toy_namespace  # noqa: E402

from fastkv.storage import open_connector, open_lookup  # noqa: E402
from fastkv.storage.base import NO_DEADLINE  # noqa: E402
from fastkv.storage.file import FileConnector  # noqa: E402
from fastkv.storage.file_config import FileStoreConfig  # noqa: E402
from fastkv.storage.namespace import StorageNamespace  # noqa: E402


def run_role(role: str, path: Path, **options: Any) -> dict[str, Any]:
    """Play a role in another process and wait for its answer."""
    process = start_role(role, path, **options)
    answer, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(answer)


def start_role(role: str, path: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a role; the caller reads its answer from stdout."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"role": role, "path": str(path), **options}) + "\n")
    process.stdin.flush()
    return process


def _role_put(task: dict[str, Any], config: FileStoreConfig, space: StorageNamespace) -> dict[str, Any]:
    connector = open_connector(config, space, task["rank"])
    outcomes = put(connector, *task["names"])
    if not task.get("killed"):
        connector.close()
    else:
        print(json.dumps({"outcomes": outcomes}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"outcomes": outcomes}


def _role_get(task: dict[str, Any], config: FileStoreConfig, space: StorageNamespace) -> dict[str, Any]:
    connector = open_connector(config, space, task["rank"])
    return {"outcomes": get(connector, *task["names"])}


def _role_lookup(task: dict[str, Any], config: FileStoreConfig, space: StorageNamespace) -> dict[str, Any]:
    return {"leading": open_lookup(config, space).contains(digests(*task["names"]), NO_DEADLINE)}


def _role_hold(task: dict[str, Any], config: FileStoreConfig, space: StorageNamespace) -> dict[str, Any]:
    """Keep the store open for writing until stdin ends."""
    connector = open_connector(config, space, task["rank"])
    print(json.dumps({"pid": os.getpid()}), flush=True)
    sys.stdin.read()
    connector.close()
    return {}


def _role_kill(task: dict[str, Any], config: FileStoreConfig, space: StorageNamespace) -> dict[str, Any]:
    """Fork a writer, SIGKILL it at a random moment, look at what is left; again and again."""
    dice = random.Random(task["seed"])
    acknowledged: list[int] = []
    report = {"rounds": 0, "lost": 0, "torn": 0, "resets": 0}
    for round_number in range(task["rounds"]):
        acknowledged += _killed_writer(config, space, acknowledged[-1] + 1000 if acknowledged else 0, dice)
        connector = FileConnector.open(config, space, 0)
        newest = acknowledged[-1] if acknowledged else 0
        in_flight = [*range(newest + 1, newest + 7)]
        if task["evict"]:  # only the youngest are sure to be there: half a store of them, whatever was in flight
            sure, rest = acknowledged[-(connector.capacity_records // 2) :], acknowledged[-100:]
        elif round_number + 1 < task["rounds"]:
            sure, rest = acknowledged[-200:] + dice.sample(acknowledged, min(len(acknowledged), 100)), []
        else:
            sure, rest = acknowledged, []
        report["lost"] += _get_each(connector, sure).count("miss")
        # Whatever else is listed must be whole: `get` compares every hit with its name's pattern.
        outcomes = _get_each(connector, [*rest, *sure, *in_flight])
        report["torn"] += sum(outcome not in ("hit", "miss") for outcome in outcomes)
        report["resets"] += connector.counters().get("resets", 0)
        connector.check_integrity()
        connector.close()
        report["rounds"] += 1
    return {**report, "acknowledged": len(acknowledged)}


def _get_each(connector: FileConnector, names: list[int]) -> list[str]:
    """Read one by one in this order, so that the last of them ends as the most recently used."""
    return [outcome for name in names for outcome in get(connector, name)]


def _killed_writer(config: FileStoreConfig, space: StorageNamespace, first: int, dice: random.Random) -> list[int]:
    """Names that a forked writer had acknowledged when it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _write_forever(config, space, first, writer)
    os.close(writer)
    started = os.read(reader, 4)  # the store is open: the kill falls into writing, not into opening
    time.sleep(dice.uniform(0.0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    data = b""
    while chunk := os.read(reader, 1 << 16):
        data += chunk
    os.close(reader)
    assert started == b"open", started
    return [name for (name,) in struct.iter_unpack("<q", data[: len(data) // 8 * 8])]


def _write_forever(config: FileStoreConfig, space: StorageNamespace, first: int, pipe: int) -> None:
    try:
        connector = FileConnector.open(config, space, 0)
        os.write(pipe, b"open")
        name = first
        while True:
            names = list(range(name, name + 3))
            buffers = [pattern(n, space.record_bytes) for n in names]
            outcomes = connector.put(digests(*names), buffers, NO_DEADLINE)
            stored = [n for n, outcome in zip(names, outcomes, strict=True) if outcome.is_stored]
            os.write(pipe, b"".join(struct.pack("<q", n) for n in stored))
            name += 3
    finally:
        os._exit(1)


ROLES: dict[str, Callable[[dict[str, Any], FileStoreConfig, StorageNamespace], dict[str, Any]]] = {
    "put": _role_put,
    "get": _role_get,
    "lookup": _role_lookup,
    "hold": _role_hold,
    "kill": _role_kill,
}


def main() -> None:
    task = json.loads(sys.stdin.readline())
    geometry = MLA if task.get("mla") else GQA
    space = toy_namespace(geometry, tp_size=task.get("tp_size", 1), record_bytes=task.get("record_bytes"))
    config = store_config(Path(task["path"]), space, task["records"], io_threads=1)
    print(json.dumps(ROLES[task["role"]](task, config, space)), flush=True)


if __name__ == "__main__":
    main()
