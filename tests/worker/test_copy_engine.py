"""CopyEngine behind CacheController: order, completion layer by layer, failures at every copy, memory in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.copies import POISON, FaultyCopier, device_memory, faulty, fill, pattern, poison, wrong_pieces
from helpers.toy import toy_config

from fastkv import CacheController, ConfigError, InvariantError, TransferError
from fastkv.core.scales import RoleScales
from fastkv.core.spec import Level, Role
from fastkv.core.transfers import TransferPlan, stage_of
from fastkv.ops import gather_cache, write_cache
from fastkv.worker import copy_engine

OFFLOAD, LOAD = (Level.DEVICE, Level.HOST), (Level.HOST, Level.DEVICE)


@pytest.fixture(autouse=True)
def one_block_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy's blocks are so small that they would leave together."""
    monkeypatch.setattr(copy_engine, "_PIECE_BYTES", 1)


MakeController = Callable[..., tuple[CacheController, FaultyCopier]]


@pytest.fixture
def make() -> Iterator[MakeController]:
    """Builds filled controllers over faulty copiers; stalled ones are let go at the end."""
    made: list[tuple[CacheController, list[FaultyCopier]]] = []

    def build(at: int = -1, what: str = "fail", *, rank: int = 0, **options: Any) -> tuple[Any, Any]:
        wrap, copiers = faulty(-1, what)
        options = {"quant_type": "block_wise_fp8", "transfer_timeout_s": 5.0, **options}
        controller = CacheController(toy_config(**options), rank, wrap_copier=wrap)
        controller.initialize_all()
        fill(controller)
        controller.submit(TransferPlan(0, (stage_of(*OFFLOAD, [0], [2]),))).wait(5)  # makes the copier
        copiers[0].calls, copiers[0].log = 0, []
        copiers[0].at = at
        controller.take_acks()
        made.append((controller, copiers))
        return controller, copiers[0]

    yield build
    for controller, copiers in made:
        copiers[0].resume.set()
        controller.free_cache()


def run(controller: CacheController, *stages: Any, plan_id: int = 1) -> Any:
    return controller.submit(TransferPlan(plan_id, stages)).wait(5)


def test_copy_order_offload_before_load_into_the_same_block(make: MakeController) -> None:
    """Kind "copy order": evict A and load B into A's block in one plan -> host holds old A, device holds B."""
    controller, _ = make()
    run(controller, stage_of(*OFFLOAD, [3], [1]))  # B, block 3's bytes, is on the host
    ack = run(controller, stage_of(*OFFLOAD, [0], [0]), stage_of(*LOAD, [1], [0]))
    assert ack.failure is None
    assert wrong_pieces(controller, {0: 3, 1: 1, 2: 2, 3: 3}) == []
    run(controller, stage_of(*LOAD, [0], [2]))
    assert wrong_pieces(controller, {2: 0}) == []


def test_copy_order_swap_of_two_blocks_over_each_other(make: MakeController) -> None:
    controller, _ = make()
    ack = run(controller, stage_of(*OFFLOAD, [0, 1], [0, 1]), stage_of(*LOAD, [1, 0], [0, 1]))
    assert ack.failure is None
    assert wrong_pieces(controller, {0: 1, 1: 0, 2: 2, 3: 3}) == []


def test_load_completes_layer_by_layer(make: MakeController) -> None:
    """A layer is readable only when its bytes landed: layer 1 stalls, layer 0 can be read, layer 2 cannot."""
    controller, copier = make(2, "stall")
    run(controller, stage_of(*OFFLOAD, [1], [0]))  # call 0
    poison(controller)
    ticket = controller.submit(TransferPlan(2, (stage_of(*LOAD, [0], [3]),)))
    assert copier.stalled.wait(5)
    controller.wait_for_layer(ticket, 0)
    memory = device_memory(controller)
    for (layer, role), block in ((key, array[3]) for key, array in memory.items()):
        expected: Any = pattern(0, layer, role, 1, len(block)) if layer == 0 else POISON
        assert (block == expected).all(), (layer, role)
    for layer in (1, 2):
        with pytest.raises(TransferError, match=r"still under way after 0.01 s \[blocks \[3\] of level DEVICE"):
            ticket.wait_for_layer(layer, 0.01)
    assert ticket.poll() is None
    copier.resume.set()
    for layer in (0, 1, 2):
        controller.wait_for_layer(ticket, layer)
    with pytest.raises(InvariantError, match="layer 3 is not one of the 3"):
        controller.wait_for_layer(ticket, 3)
    assert ticket.wait(5).failure is None
    assert wrong_pieces(controller, {3: 1, 0: None}) == []


def test_load_after_an_offload_in_one_plan_reports_no_layer_early(make: MakeController) -> None:
    controller, copier = make(1, "stall")
    run(controller, stage_of(*OFFLOAD, [3], [1]))
    ticket = controller.submit(TransferPlan(2, (stage_of(*OFFLOAD, [0], [0]), stage_of(*LOAD, [1], [0]))))
    assert copier.stalled.wait(5)
    with pytest.raises(TransferError, match="still under way"):
        ticket.wait_for_layer(0, 0.01)
    copier.resume.set()
    controller.wait_for_layer(ticket, 2)
    assert wrong_pieces(controller, {0: 3}) == []


def test_load_that_another_load_follows_in_its_plan_reports_no_layer_early(make: MakeController) -> None:
    """A layer of a step is readable when all loads of the plan have landed there, not when the first one has."""
    controller, copier = make()
    run(controller, stage_of(*OFFLOAD, [3, 1], [1, 0]))
    copier.at, copier.calls, copier.what = 3, 0, "stall"  # the first layer of the second load
    ticket = controller.submit(TransferPlan(2, (stage_of(*LOAD, [1], [0]), stage_of(*LOAD, [0], [2]))))
    assert copier.stalled.wait(5)
    with pytest.raises(TransferError, match="still under way"):
        ticket.wait_for_layer(0, 0.01)
    copier.resume.set()
    controller.wait_for_layer(ticket, 2)
    assert wrong_pieces(controller, {0: 3, 2: 1}) == []


@pytest.mark.parametrize("what", ["fail", "scribble"])
def test_failed_copy_at_every_call_is_in_the_ticket_and_stops_the_plan(make: MakeController, what: str) -> None:
    """Kind "failed load", at the Nth copy for every N: level, ids, layer and cause; earlier stages are whole, later
    ones never start; blocks that no failed stage names are untouched; the engine goes on."""
    stages = (stage_of(*OFFLOAD, [0, 1], [0, 1]), stage_of(*LOAD, [0, 1], [2, 3]))
    num_calls = 2 + 3  # two blocks out, three layers in
    for nth in range(num_calls + 1):
        controller, copier = make(nth, what)
        ack = run(controller, *stages)
        assert controller.take_acks() == [ack]
        assert controller.num_unfinished == 0
        assert wrong_pieces(controller, {0: 0, 1: 1}) == []
        if nth == num_calls:
            assert ack.failure is None
            assert wrong_pieces(controller, {2: 0, 3: 1}) == []
            continue
        assert copier.calls == nth + 1
        failure = ack.failure
        assert f"copy {nth} failed on purpose" in failure.cause
        if nth < 2:
            assert (failure.stage, failure.destination, failure.layer) == (0, Level.HOST, -1)
            assert failure.block_ids == (nth,)
            assert wrong_pieces(controller, {2: 2, 3: 3}) == []  # the load never began
        else:
            assert (failure.stage, failure.destination, failure.layer) == (1, Level.DEVICE, nth - 2)
            assert failure.block_ids == (2, 3)
        ack = run(controller, *stages, plan_id=2)
        assert ack.failure is None
        assert wrong_pieces(controller, {0: 0, 1: 1, 2: 0, 3: 1}) == []


def test_failed_load_releases_waiters_with_the_error(make: MakeController) -> None:
    """Kind "failed load": layers before the failed one were readable, the others raise, and so does every layer once
    the failure is known."""
    controller, copier = make(2, rank=1, tp_size=2)
    run(controller, stage_of(*OFFLOAD, [1], [0]))
    copier.gate.clear()
    ticket = controller.submit(TransferPlan(7, (stage_of(*LOAD, [0], [3]),)))
    errors: list[TransferError] = []

    def wait(layer: int) -> None:
        try:
            ticket.wait_for_layer(layer, 5)
        except TransferError as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait, args=(layer,)) for layer in (1, 2)]
    for waiter in waiters:
        waiter.start()
    copier.gate.set()
    for waiter in waiters:
        waiter.join(5)
    assert len(errors) == 2
    for error in errors:
        assert (error.level, error.block_ids, error.layer) == ("DEVICE", (3,), 1)
        assert "plan 7 failed on rank 1, HOST to DEVICE: OSError: copy 2 failed on purpose" in str(error)
    with pytest.raises(TransferError, match="on purpose"):
        controller.wait_for_layer(ticket, 0)


def test_load_overtakes_offloads_and_each_is_acknowledged_once(make: MakeController) -> None:
    controller, copier = make(0, "stall")
    slow = [controller.submit(TransferPlan(i, (stage_of(*OFFLOAD, [0, 1], [0, 1]),))) for i in (1, 2)]
    assert copier.stalled.wait(5)
    load = controller.submit(TransferPlan(3, (stage_of(*LOAD, [2], [3]),)))
    assert controller.num_unfinished == 3
    copier.resume.set()
    assert load.wait(5).failure is None
    for ticket in slow:
        ticket.wait(5)
    directions = [entry[0].name for entry in copier.log]
    assert directions == ["TO_HOST", *["TO_DEVICE"] * 3, *["TO_HOST"] * 3]
    acks = controller.take_acks()
    assert [ack.plan_id for ack in acks] == [3, 1, 2]
    assert controller.take_acks() == []


def test_take_acks_waits_for_the_first_and_not_without_work(make: MakeController) -> None:
    controller, copier = make(0, "stall")
    start = time.monotonic()
    assert controller.take_acks(wait_s=10) == []  # nothing is under way
    controller.submit(TransferPlan(1, (stage_of(*OFFLOAD, [0], [0]),)))
    assert copier.stalled.wait(5)
    assert controller.take_acks(wait_s=0.01) == []
    threading.Timer(0.05, copier.resume.set).start()
    assert [ack.plan_id for ack in controller.take_acks(wait_s=10)] == [1]
    assert time.monotonic() - start < 8


def test_in_flight_memory_is_neither_zeroed_nor_freed_nor_released(make: MakeController) -> None:
    """Kind "in flight": pause a copy; reset, sleep and free wait for it and refuse when it does not end."""
    controller, copier = make(0, "stall", transfer_timeout_s=0.05)
    ticket = controller.submit(TransferPlan(1, (stage_of(*OFFLOAD, [1], [0]),)))
    assert copier.stalled.wait(5)
    for call, what in (
        (controller.reset_cache, "reset"),
        (controller.sleep, "sleep"),
        (controller.free_cache, "free"),
    ):
        with pytest.raises(TransferError, match=f"cannot {what} the caches: 1 transfers"):
            call()
    assert wrong_pieces(controller, {i: i for i in range(4)}) == []
    copier.resume.set()
    assert ticket.wait(5).failure is None
    controller.reset_cache()
    assert not any(array.any() for array in device_memory(controller).values())
    assert not controller.host_records.any()


def test_submit_refuses_what_cannot_be_carried_out_and_starts_nothing(make: MakeController) -> None:
    controller, copier = make()
    for plan, error, text in (
        (TransferPlan(1, ()), InvariantError, "no stage"),
        (TransferPlan(1, (stage_of(*LOAD, [0], [1]), stage_of(*LOAD, [3], [1]))), InvariantError, "stage 1"),
        # ids past the pool are the proposer's scratch, although MTP tensors may have them
        (TransferPlan(1, (stage_of(*LOAD, [0], [4]),)), InvariantError, "DEVICE ids"),
        (
            TransferPlan(1, (stage_of(Level.HOST, Level.STORAGE, [0], digests=[bytes(32)]),)),
            TransferError,
            "none is configured",
        ),
    ):
        with pytest.raises(error, match=text):
            controller.submit(plan)
    assert copier.calls == 0
    assert controller.num_unfinished == 0


def test_submit_without_host_cache_or_mtp_cache_is_a_config_error() -> None:
    plan = TransferPlan(1, (stage_of(*OFFLOAD, [0], [0]),))
    controller = CacheController(toy_config(num_host_blocks=0))
    controller.initialize_all()
    with pytest.raises(ConfigError, match="there is no host cache"):
        controller.submit(plan)
    controller = CacheController(toy_config())
    controller.initialize_kv_cache()
    controller.initialize_host_cache()
    with pytest.raises(ConfigError, match="mtp caches are not initialised"):
        controller.submit(plan)


@pytest.mark.parametrize("quant_type", ["block_wise_fp8", "int8"])
def test_scales_two_blocks_swapped_over_each_other_and_slept_over_dequantise_alike(quant_type: str) -> None:
    """Kind "scales": dynamic ones travel with their block, static ones outlive sleep."""
    scales = {Role.KEY: flat_scales(0.5), Role.VALUE: flat_scales(2.0)}
    config = toy_config(quant_type=quant_type, dtype="float32")
    controller = CacheController(
        config, static_scales=dict.fromkeys(range(3), scales) if quant_type == "int8" else None
    )
    controller.initialize_all()
    rng = np.random.default_rng(0)
    slots = paddle.to_tensor(np.arange(8, dtype=np.int64))  # blocks 0 and 1
    sizes = np.repeat([0.5, 2.0], 4)[:, None, None].astype(np.float32)
    for layer in range(3):
        k, v = (paddle.to_tensor(rng.uniform(-60, 60, (8, 2, 8)).astype(np.float32) * sizes) for _ in range(2))
        write_cache(k, v, controller.layer_cache(layer), slots)

    def rows() -> list[np.ndarray]:
        return [
            x.numpy() for layer in range(3) for x in gather_cache(controller.layer_cache(layer), slots) if x is not None
        ]

    before = rows()
    ack = run(controller, stage_of(*OFFLOAD, [0, 1], [0, 1]), stage_of(*LOAD, [1, 0], [0, 1]))
    assert ack.failure is None
    swapped = [np.concatenate([row[4:], row[:4]]) for row in before]
    assert all(np.array_equal(now, old) for now, old in zip(rows(), swapped, strict=True))
    controller.sleep()
    controller.wake()
    run(controller, stage_of(*LOAD, [0, 1], [0, 1]), plan_id=2)
    assert all(np.array_equal(now, old) for now, old in zip(rows(), before, strict=True))
    controller.free_cache()


def test_sleep_gives_memory_back_and_wakes_at_the_same_addresses() -> None:
    controller = CacheController(toy_config(dtype="float32", num_device_blocks=4000, num_host_blocks=400))
    controller.initialize_all()
    address = controller.layer_cache(2).key.data_ptr()
    for array in device_memory(controller).values():
        array[:] = 7
    run(controller, stage_of(*OFFLOAD, [1], [0]))
    resident = resident_bytes()
    controller.sleep()
    controller.sleep()
    assert resident_bytes() < resident - controller.group_bytes("main") // 2
    assert controller.is_asleep
    with pytest.raises(TransferError, match="asleep"):
        controller.submit(TransferPlan(2, (stage_of(*LOAD, [0], [1]),)))
    controller.wake()
    assert controller.layer_cache(2).key.data_ptr() == address
    assert not any(array.any() for array in device_memory(controller).values())
    run(controller, stage_of(*LOAD, [0], [1]))  # the host was kept
    assert all((array[1] == 7).all() and not array[2].any() for array in device_memory(controller).values())
    controller.sleep(release_host=True)
    controller.wake()
    assert not controller.host_records.any()
    controller.free_cache()


def test_free_and_initialise_ten_times_leaves_threads_and_memory_as_they_were(make: MakeController) -> None:
    """Kind "resize, clear, rebuild"."""
    controller, _ = make()
    counts = []
    for _ in range(10):
        controller.free_cache()
        controller.initialize_all()
        run(controller, stage_of(*OFFLOAD, [1], [0]))
        counts.append(threading.active_count())
    assert len(set(counts)) == 1


def flat_scales(scale: float) -> RoleScales:
    return RoleScales(np.full(16, scale, np.float32), None)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
