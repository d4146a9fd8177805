"""Storage below the host, on the worker's side: bytes, outcomes, deadlines, and what keys are made of."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.copies import POISON, fill, poison, wrong_pieces
from helpers.storage_faults import Fault, FaultyConnector, MemoryConnector
from helpers.tier_process import CASES, DIGESTS, case_config, opened
from helpers.toy import toy_config, toy_data

from fastkv import CacheController, Config, ConfigError, StorageError, TransferError, parse_config
from fastkv.core.scales import CalibrationRanges, ValueRange
from fastkv.core.spec import Level, Role
from fastkv.core.transfers import TransferAck, TransferPlan, stage_of
from fastkv.storage.base import StorageConnector
from fastkv.storage.namespace import StorageNamespace
from fastkv.storage.write_behind import StorageWorkerConfig
from fastkv.worker.static_scales import write_scales_file
from fastkv.worker.storage_access import StorageAccess, open_storage, storage_namespace

OFFLOAD, LOAD = (Level.DEVICE, Level.HOST), (Level.HOST, Level.DEVICE)


def put(ids: list[int], digests: list[bytes]) -> Any:
    return stage_of(Level.HOST, Level.STORAGE, ids, digests=digests)


def get(ids: list[int], digests: list[bytes]) -> Any:
    return stage_of(Level.STORAGE, Level.HOST, destination_ids=ids, digests=digests)


def over(connector: StorageConnector, **options: Any) -> CacheController:
    """A filled controller over a given connector."""
    controller = CacheController(toy_config(quant_type="block_wise_fp8", transfer_timeout_s=20))
    controller.initialize_all()
    space = StorageNamespace.from_spec(controller.spec, model="toy")
    controller.attach_storage(StorageAccess(lambda _: connector, space, **options))
    fill(controller)
    return controller


def run(controller: CacheController, *stages: Any, plan_id: int = 1) -> TransferAck:
    return controller.submit(TransferPlan(plan_id, stages)).wait(20)


def close(controller: CacheController) -> None:
    storage = controller.storage
    controller.free_cache()
    assert storage is not None
    assert storage.close()


@pytest.fixture
def record_bytes() -> int:
    return toy_config(quant_type="block_wise_fp8").cache_spec().record_stride_bytes


def test_byte_patterns_device_host_disk_other_process_host_device(tmp_path: Path) -> None:
    """All storage types, GQA, MLA, DSA, MTP on, one rank and two: bit-equal in the other process, neighbours
    untouched."""
    for *case, rank in CASES:
        controller = opened(case_config(tmp_path, *case), rank)
        fill(controller)
        controller.host_records[:] = POISON
        ack = run(controller, stage_of(*OFFLOAD, [1, 2], [0, 2]), put([0, 2], DIGESTS[1:3]))
        assert ack == TransferAck(1, rank, None, b"\x01\x01")
        assert (controller.host_records[1] == POISON).all()
        assert wrong_pieces(controller, {i: i for i in range(4)}) == []
        close(controller)
    command = [sys.executable, "-m", "helpers.tier_process", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [f"checked {len(CASES)}"], done.stdout + done.stderr


def test_get_of_what_is_not_there_is_a_miss_and_no_failure(record_bytes: int) -> None:
    controller = over(MemoryConnector(record_bytes))
    run(controller, stage_of(*OFFLOAD, [1], [0]), put([0], DIGESTS[:1]))
    ack = run(controller, get([1, 2], DIGESTS[:2]))
    assert (ack.failure, ack.landed) == (None, b"\x01\x00")
    # a plan that goes on with records that did not land fails instead of loading garbage
    poison(controller)
    ack = run(controller, get([1, 2], DIGESTS[:2]), stage_of(*LOAD, [1, 2], [0, 1]))
    assert ack.failure is not None
    assert (ack.failure.stage, ack.failure.block_ids) == (0, (2,))
    assert "1 records were not in storage" in ack.failure.cause
    assert wrong_pieces(controller, {0: None, 1: None}) == []
    close(controller)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FULL, Fault.RAISE, Fault.STALL, Fault.CORRUPT])
def test_connector_fault_at_every_call_costs_a_miss_and_never_wrong_bytes(fault: Fault, record_bytes: int) -> None:
    """Kinds "partial object in storage" and "storage keys": two puts and two gets, the fault at each of them; what
    counts as landed is bit-equal, and a failed put can be retried."""
    for nth in range(4):
        connector = FaultyConnector(MemoryConnector(record_bytes), fault, nth, stall_s=0.05)
        controller = over(connector)
        acks = []
        for block in (0, 1):
            acks.append(run(controller, stage_of(*OFFLOAD, [block], [block]), put([block], [DIGESTS[block]])))
        poison(controller)
        controller.host_records[:] = POISON
        for block in (0, 1):
            acks.append(run(controller, get([block], [DIGESTS[block]])))
            if acks[-1].landed == b"\x01":
                assert run(controller, stage_of(*LOAD, [block], [block + 2])).failure is None
        assert all(ack.failure is None for ack in acks)
        landed = [ack.landed == b"\x01" for ack in acks]
        wanted = {2 + block: block if landed[2 + block] else None for block in (0, 1)}
        assert wrong_pieces(controller, wanted) == [], (nth, landed)
        if fault is Fault.STALL:
            assert all(landed)
        elif fault is not Fault.CORRUPT:
            assert not landed[nth]
            assert f"injected_{fault.value}" in controller.storage.counters()
        fill(controller)
        run(controller, stage_of(*OFFLOAD, [0, 1], [0, 1]))
        assert run(controller, put([0, 1], [bytes(32), bytes([1]) * 32])).landed == b"\x01\x01"  # it goes on
        close(controller)


def test_get_past_its_deadline_is_acknowledged_only_when_the_buffer_is_free(record_bytes: int) -> None:
    """Kind "in flight": a backend that hangs may still write into the record, so the record stays in flight."""
    connector = MemoryConnector(record_bytes)
    controller = over(connector, get_timeout_s=0.05)
    run(controller, stage_of(*OFFLOAD, [1], [0]), put([0], DIGESTS[:1]))
    connector.gate.clear()
    ticket = controller.submit(TransferPlan(2, (get([2], DIGESTS[:1]),)))
    time.sleep(0.15)
    assert ticket.poll() is None
    assert controller.num_unfinished == 1
    # other batches are not held up by the one that hangs: refused, and acknowledged at once
    refused = controller.submit(TransferPlan(3, (get([1], DIGESTS[:1]),)))
    assert refused.wait(1).landed == b"\x00"
    connector.gate.set()
    assert ticket.wait(5).landed == b"\x00"  # late: it does not count
    close(controller)


def test_put_behind_a_full_queue_is_dropped_at_once(record_bytes: int) -> None:
    connector = MemoryConnector(record_bytes)
    connector.gate.clear()
    controller = over(connector, bounds=StorageWorkerConfig(max_queued_records=1))
    start = time.monotonic()
    tickets = [controller.submit(TransferPlan(i, (put([0], [DIGESTS[i]]),))) for i in range(4)]
    assert time.monotonic() - start < 1
    threading.Timer(0.05, connector.gate.set).start()
    landed = [ticket.wait(10).landed for ticket in tickets]
    assert landed.count(b"\x00") >= 1  # one ran, one waited, the others found no room
    assert landed[0] == b"\x01"
    assert controller.storage.counters()["worker_put_dropped"] == landed.count(b"\x00")
    close(controller)


def test_stale_after_update_storage_is_empty_under_new_weights(tmp_path: Path) -> None:
    """Kind "stale after update": the version is part of the namespace; going back finds the old records again."""
    data = toy_data("gqa")
    data["storage"] = {"path": "store", "max_bytes": "16MiB", "segment_bytes": "1MiB"}
    config = parse_config(data, base_dir=tmp_path)
    controller = CacheController(config)
    controller.initialize_all()
    fill(controller)
    storage = open_storage(config, storage_namespace(config, "w1", {"theta": 10000}), 0)
    controller.attach_storage(storage)
    assert run(controller, stage_of(*OFFLOAD, [1], [0]), put([0], DIGESTS[:1])).landed == b"\x01"
    assert run(controller, get([1], DIGESTS[:1])).landed == b"\x01"
    storage.set_weights_version("2")
    assert run(controller, get([1], DIGESTS[:1])).landed == b"\x00"
    storage.set_weights_version("")
    assert run(controller, get([1], DIGESTS[:1])).landed == b"\x01"
    assert (tmp_path / "store").is_dir()  # a relative path starts at the config's folder
    with pytest.raises(StorageError, match="open for writing by process"):
        open_storage(config, storage.namespace, 0)
    close(controller)


def test_namespace_differs_with_weights_scales_rope_and_config(tmp_path: Path) -> None:
    def config(scale: float = 1.0, **changes: Any) -> Config:
        one = ValueRange(-np.full((2, 8), scale, np.float32), np.full((2, 8), scale, np.float32))
        path = tmp_path / f"scales-{scale}.json"
        ranges = CalibrationRanges("toy", "", "max", 1, {i: {Role.KEY: one, Role.VALUE: one} for i in range(3)})
        write_scales_file(path, ranges)
        return toy_config(quant_type="int8", scales_file=str(path), **changes)

    rope = {"theta": 10000.0}
    digests = [
        storage_namespace(config(), "w1", rope).digest,
        storage_namespace(config(), "w2", rope).digest,
        storage_namespace(config(), "w1", {"theta": 5e5}).digest,
        storage_namespace(config(scale=2.0), "w1", rope).digest,
        storage_namespace(config(tp_size=2), "w1", rope).digest,
        storage_namespace(config(mtp=False), "w1", rope).digest,
        storage_namespace(toy_config(), "w1", rope).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert storage_namespace(config(), "w1", rope).digest == digests[0]


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"path": "x"}, "max_bytes"),
        ({"path": "x", "max_bytes": 0.5}, "storage.max_bytes: 0.5 must be a size"),
        ({"path": "x", "max_bytes": "0"}, "storage.max_bytes"),
        ({"path": "x", "max_bytes": "1GiB", "segment_bytes": "no"}, "storage.segment_bytes"),
        ({"path": "x", "max_bytes": "1GiB", "backend": "redis"}, "storage.backend: 'redis'.*allowed: file"),
        ({"path": "x", "max_bytes": "1GiB", "get_timeout_s": 0}, "storage.get_timeout_s"),
        ({"path": "x", "max_byte": "1GiB"}, "did you mean max_bytes"),
    ],
)
def test_storage_section_bad_value_is_a_config_error(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config({**toy_data(), "storage": section})


def test_storage_without_host_cache_or_prefix_caching_is_a_config_error() -> None:
    section = {"path": "x", "max_bytes": "1GiB"}
    with pytest.raises(ConfigError, match="records pass through the host cache"):
        parse_config({**toy_data(num_host_blocks=0), "storage": section})
    with pytest.raises(ConfigError, match="records pass through the host cache"):
        parse_config({**toy_data(num_host_blocks=0, host_memory="0MiB"), "storage": section})
    with pytest.raises(ConfigError, match="without prefix caching"):
        parse_config({**toy_data(enable_prefix_caching=False), "storage": section})
    with pytest.raises(ConfigError, match=r"cache.write_policy: 'lazy'.*write_back"):
        parse_config(toy_data(write_policy="lazy"))
    with pytest.raises(ConfigError, match="no storage section"):
        open_storage(toy_config(), StorageNamespace.from_spec(toy_config().cache_spec(), model="toy"), 0)


def test_storage_attached_late_or_without_host_is_refused(record_bytes: int) -> None:
    controller = over(MemoryConnector(record_bytes))
    storage = controller.storage
    assert storage is not None
    run(controller, stage_of(*OFFLOAD, [1], [0]))
    with pytest.raises(ConfigError, match="before the first submit"):
        controller.attach_storage(storage)
    close(controller)
    assert storage.counters() == {}
    fresh = CacheController(toy_config())
    fresh.initialize_all()
    with pytest.raises(TransferError, match="none is configured"):
        fresh.submit(TransferPlan(1, (put([0], DIGESTS[:1]),)))
    small = CacheController(parse_config(toy_data(num_host_blocks=0)))
    small.initialize_all()
    with pytest.raises(ConfigError, match=r"no block of \d+ bytes; raise cache.host_memory"):
        small.attach_storage(storage)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("fastkv-storage-")}
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = {t for t in threading.enumerate() if t.name.startswith("fastkv-storage-p")} - before
        if not left:
            return
        time.sleep(0.01)
    pytest.fail(f"threads left: {left}")
