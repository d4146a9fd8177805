"""RecordCopier: every byte of every group, layer and role moves, and no other byte does."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.copies import (
    POISON,
    device_memory,
    fill,
    legal_pairs,
    naive_copy,
    poison,
    wrong_pieces,
)
from helpers.toy import toy_config, toy_data

from fastkv import CacheController, ConfigError, InvariantError, TransferError, parse_config
from fastkv.core.spec import Role
from fastkv.ops._load import force_isa
from fastkv.worker import records
from fastkv.worker.records import _LANDED, Direction, RecordCopier, _library

MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.12 on


def allocated(attention: str, quant_type: str = "none", rank: int = 0, tp_size: int = 1, **cache) -> CacheController:
    config = toy_config(attention, quant_type=quant_type, tp_size=tp_size, **cache)
    controller = CacheController(config, rank)
    controller.initialize_all()
    return controller


def copier_of(controller: CacheController, threads: int = 2) -> RecordCopier:
    tensors = {}
    for group in controller.spec.groups:
        tensors |= controller._caches.tensors(group.name)
    return RecordCopier(controller.spec, tensors, controller.num_blocks, controller.host_records, threads)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("attention", "quant_type"), list(legal_pairs()))
def test_state_left_out_of_a_move_every_role_comes_back_bit_equal(attention: str, quant_type: str, rank: int) -> None:
    """Kind "state left out of a move": swaps that forgot scales, the indexer or the MTP layers."""
    controller = allocated(attention, quant_type, rank, tp_size=2)
    spec = controller.spec
    copier = copier_of(controller)
    assert copier.num_layers == 3  # two main, one MTP
    assert sum(copier.layer_bytes(layer) for layer in range(3)) == spec.block_bytes
    fill(controller)
    host = controller.host_records
    host[:] = POISON
    every = range(copier.num_layers)
    copier.copy(Direction.TO_HOST, np.array([1, 2], np.int32), np.array([0, 2], np.int32), every)
    assert (host[1] == POISON).all()
    inside = np.zeros(spec.record_stride_bytes, dtype=bool)
    for part in spec.record_parts:
        inside[part.offset : part.offset + part.nbytes] = True
    assert (host[:, ~inside] == POISON).all()  # padding belongs to nobody
    poison(controller)
    copier.copy(Direction.TO_DEVICE, np.array([3, 0], np.int32), np.array([0, 2], np.int32), every)
    assert wrong_pieces(controller, {3: 1, 0: 2, 1: None, 2: None}) == []
    copier.close()


@pytest.mark.parametrize("isa", ["portable", "best"])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_blocks"), [(7, 3, 5), (8, 4, 40), (80, 5, 9), (64, 64, 6), (64, 64, 48)]
)
def test_copier_equals_the_naive_copy_for_every_layer_range(
    isa: str, head_dim: int, block_size: int, num_blocks: int
) -> None:
    """Odd sizes have heads and tails that cannot be streamed; large ones are shared between threads."""
    data = toy_data("gqa", quant_type="int8", num_device_blocks=num_blocks, num_host_blocks=num_blocks)
    data["model"]["head_dim"] = head_dim
    data["cache"]["block_size"] = block_size
    controller = CacheController(parse_config(data))
    controller.initialize_all()
    copier, memory, host = copier_of(controller), device_memory(controller), controller.host_records
    rng = np.random.default_rng(num_blocks)
    force_isa(isa)
    try:
        for direction in Direction:
            for layers in (range(1), range(1, 3), range(3)):
                for count in (0, 1, num_blocks // 2, num_blocks):
                    for array in (host, *memory.values()):
                        array[:] = rng.integers(0, 256, array.shape, dtype=np.uint8)
                    device_ids, host_ids = (rng.permutation(num_blocks)[:count].astype(np.int32) for _ in range(2))
                    expected_host, expected = host.copy(), {key: array.copy() for key, array in memory.items()}
                    args = device_ids.tolist(), host_ids.tolist(), layers
                    naive_copy(controller.spec, expected, expected_host, direction, *args)
                    copier.copy(direction, device_ids, host_ids, layers)
                    assert np.array_equal(host, expected_host)
                    assert all(np.array_equal(memory[key], expected[key]) for key in memory)
    finally:
        force_isa("best")
        copier.close()


@pytest.mark.parametrize("isa", ["portable", "best"])
@pytest.mark.parametrize("direction", Direction)
def test_copier_pieces_of_any_size_at_any_address_move_alone(isa: str, direction: Direction) -> None:
    """Sizes around a line and around both distances of fetching, at addresses that no line starts at."""
    sizes = [1, 15, 63, 64, 65, 511, 512, 513, 575, 577, 639, 2047, 2048, 2049, 5000]
    rng, blocks, records, gap = np.random.default_rng(4), 7, 5, 13
    stride = sum(sizes) + gap * len(sizes)
    device = rng.integers(0, 256, (len(sizes), blocks * (max(sizes) + gap)), dtype=np.uint8)
    host = rng.integers(0, 256, (records, stride), dtype=np.uint8)
    want_device, want_host = device.copy(), host.copy()
    device_ids, host_ids = np.array([6, 0, 3], np.int32), np.array([1, 4, 2], np.int32)
    offset, table = 0, np.empty((len(sizes), 4), np.int64)
    for part, size in enumerate(sizes):
        table[part] = device[part].ctypes.data + part, size + gap - 1, size, offset
        for block, record in zip(device_ids.tolist(), host_ids.tolist(), strict=True):
            start = part + block * (size + gap - 1)
            pieces = want_host[record, offset : offset + size], want_device[part, start : start + size]
            pieces[direction][:] = pieces[1 - direction]
        offset += size + gap
    force_isa(isa)
    try:
        refused = _library().fastkv_copy_records(
            None, table.ctypes.data, len(table), blocks, host.ctypes.data, stride, records,
            device_ids.ctypes.data, host_ids.ctypes.data, 3, int(direction), None, 0, _LANDED(), None, 0,
        )  # fmt: skip
    finally:
        force_isa("best")
    assert not refused
    assert np.array_equal(host, want_host)
    assert np.array_equal(device, want_device)


def test_copier_callers_at_once_each_get_their_bytes() -> None:
    """Copies share the threads: a second caller waits for the first one's, and neither's work is lost."""
    data = toy_data("gqa", quant_type="int8", num_device_blocks=48, num_host_blocks=48)
    data["model"]["head_dim"] = 64
    data["cache"]["block_size"] = 64
    controller = CacheController(parse_config(data))
    controller.initialize_all()
    copier, memory, host = copier_of(controller), device_memory(controller), controller.host_records
    fill(controller)
    expected = host.copy()
    args = list(range(48)), list(range(48)), range(3)
    naive_copy(controller.spec, memory, expected, Direction.TO_HOST, *args)

    def copy(caller: int) -> None:
        ids = np.arange(caller, 48, 4, dtype=np.int32)
        for _ in range(10):
            host[ids] = 0
            copier.copy(Direction.TO_HOST, ids, ids, range(3))
            assert np.array_equal(host[ids], expected[ids])

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(copy, range(4)))
    assert np.array_equal(host, expected)
    copier.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_copier_tells_what_landed_when_it_is_there(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_GROUP_BYTES", 512 << 10)
    data = toy_data("gqa", quant_type="int8", num_device_blocks=48, num_host_blocks=48)
    data["model"] |= {"head_dim": 64, "num_layers": 6}
    data["cache"]["block_size"] = 64
    controller = CacheController(parse_config(data))
    controller.initialize_all()
    copier, memory, host = copier_of(controller, threads), device_memory(controller), controller.host_records
    host[:] = np.random.default_rng(3).integers(0, 256, host.shape, dtype=np.uint8)
    ids = np.arange(48, dtype=np.int32)
    for _ in range(20):
        for array in memory.values():
            array[:] = 0
        told: list[int] = []

        def landed(num_layers: int, told: list[int] = told) -> None:
            told.append(num_layers)
            part = next(
                p for p in controller.spec.record_parts if p.layer == num_layers - 1 and p.role.role is Role.VALUE
            )
            assert np.array_equal(memory[num_layers - 1, Role.VALUE], host[:, part.offset : part.offset + part.nbytes])

        copier.copy(Direction.TO_DEVICE, ids, ids, range(7), landed)
        assert told == sorted(set(told))
        assert told[-1] == 7
        assert all(
            np.array_equal(memory[p.layer, p.role.role], host[:, p.offset : p.offset + p.nbytes])
            for p in controller.spec.record_parts
        )

    def broken(num_layers: int) -> None:
        raise RuntimeError(f"told {num_layers}")

    with pytest.raises(RuntimeError, match="told"):  # not lost on its way through C
        copier.copy(Direction.TO_DEVICE, ids, ids, range(7), broken)
    copier.copy(Direction.TO_DEVICE, ids[:0], ids[:0], range(2, 4), told.append)
    assert told[-1] == 4  # nothing to copy has landed at once
    copier.close()


def test_copier_tells_a_layer_after_its_last_block_however_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take some blocks at a time: a layer of one block more than that has not landed after the first turn."""
    monkeypatch.setattr(records, "_GROUP_BYTES", 1)
    data = toy_data("mla", num_device_blocks=48, num_host_blocks=48)
    data["cache"]["block_size"] = 64  # 3 KiB a block and layer, of which 42 are taken at a time
    controller = CacheController(parse_config(data))
    controller.initialize_all()
    copier, memory, host = copier_of(controller, threads=1), device_memory(controller), controller.host_records
    host[:] = np.random.default_rng(3).integers(0, 256, host.shape, dtype=np.uint8)
    parts = controller.spec.record_parts
    for count in range(1, 49):
        ids = np.arange(count, dtype=np.int32)
        for array in memory.values():
            array[:] = 0
        told: list[int] = []

        def landed(num_layers: int, told: list[int] = told, count: int = count) -> None:
            told.append(num_layers)
            part = parts[num_layers - 1]
            there = memory[part.layer, part.role.role][:count]
            assert np.array_equal(there, host[:count, part.offset : part.offset + part.nbytes])

        copier.copy(Direction.TO_DEVICE, ids, ids, range(3), landed)
        assert told == [1, 2, 3]
    copier.close()


def test_copier_part_that_ends_past_its_record_is_refused_and_nothing_moves() -> None:
    device, host, message = np.ones(64, np.uint8), np.zeros((2, 32), np.uint8), ctypes.create_string_buffer(512)
    ids = np.zeros(1, np.int32)
    for nbytes, is_refused in ((17, True), (16, False)):
        table = np.array([[device.ctypes.data, 64, nbytes, 16]], np.int64)
        refused = _library().fastkv_copy_records(
            None, table.ctypes.data, 1, 1, host.ctypes.data, 32, 2,
            ids.ctypes.data, ids.ctypes.data, 1, int(Direction.TO_HOST), None, 0, _LANDED(), message, 512,
        )  # fmt: skip
        assert bool(refused) is is_refused
        assert host.sum() == (0 if is_refused else 16)
    assert b"ends at 33 of a record of 32 bytes" in message.value


def test_copier_id_out_of_range_is_refused_and_nothing_moves() -> None:
    controller = allocated("gqa")
    copier = copier_of(controller)
    fill(controller)
    for device_id, host_id in ((4, 0), (-1, 0), (0, 3), (0, -1)):
        with pytest.raises(TransferError, match="but there are"):
            copier.copy(Direction.TO_DEVICE, np.array([1, device_id]), np.array([1, host_id]), range(3))
    with pytest.raises(InvariantError, match="in one copy"):
        copier.copy(Direction.TO_DEVICE, np.array([1, 2]), np.array([1]), range(3))
    assert wrong_pieces(controller, {i: i for i in range(4)}) == []
    copier.close()
    with pytest.raises(TransferError, match="closed"):
        copier.copy(Direction.TO_DEVICE, np.array([1]), np.array([1]), range(3))


def test_copier_refuses_memory_that_is_not_what_the_spec_says() -> None:
    controller = allocated("gqa", "block_wise_fp8")
    tensors = {**controller._caches.tensors("main"), **controller._caches.tensors("mtp")}
    host = controller.host_records
    with pytest.raises(InvariantError, match="mtp layer 2 key is not allocated"):
        RecordCopier(controller.spec, controller._caches.tensors("main"), 4, host)
    with pytest.raises(InvariantError, match="has shape"):
        RecordCopier(controller.spec, tensors, 5, host)
    with pytest.raises(InvariantError, match="host records of shape"):
        RecordCopier(controller.spec, tensors, 4, host[:, :-64])


def test_copier_more_threads_than_the_system_gives_is_a_config_error() -> None:
    controller = allocated("gqa")
    with pytest.raises(ConfigError, match="lower cache.copy_threads"):
        copier_of(controller, threads=100_000)


def test_copier_offsets_past_32_bits_reach_the_right_bytes() -> None:
    """Kind "32-bit offsets": a block and a record that lie more than 2^32 bytes in."""
    size, stride = 5 << 30, 1 << 20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    device, host = (np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=np.uint8) for _ in range(2))
    far, message = size // stride - 1, ctypes.create_string_buffer(512)
    assert far * stride > 2**32
    device[far * stride : far * stride + 100] = np.arange(100)
    table = np.array([[device.ctypes.data, stride, 100, 64]], dtype=np.int64)
    ids, records = np.array([far], np.int32), np.array([far - 1], np.int32)
    for direction in Direction:
        refused = _library().fastkv_copy_records(
            None, table.ctypes.data, 1, far + 1, host.ctypes.data, stride, far + 1,
            ids.ctypes.data, records.ctypes.data, 1, int(direction), None, 0, _LANDED(), message, 512,
        )  # fmt: skip
        assert not refused, message.value
        where = (far - 1) * stride + 64 if direction is Direction.TO_HOST else far * stride
        memory = host if direction is Direction.TO_HOST else device
        assert memory[where : where + 100].tolist() == list(range(100))
        if direction is Direction.TO_HOST:
            device[far * stride : far * stride + 100] = 0
