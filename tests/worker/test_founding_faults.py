"""The two faults that fastkv grew from, over every combination that a config can ask for.

FastDeploy#7757: the v1 controller allocated main and MTP caches in the model's bfloat16 although kv_cache_quant_type
was set, and the attention op aborted. kvcached#387: pools were sized and counted with the logical dtype while memory
held one byte an element. Each test below fails as soon as any path goes back to the logical dtype.
"""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import pytest
from helpers.toy import toy_config, toy_data

from fastkv import CacheController, ConfigError, RunnerCache, parse_config
from fastkv.core.dtype import MODEL_DTYPES, STORAGE_DTYPES, AttentionKind, KVCacheQuantType
from fastkv.core.spec import Level, Role

KINDS = list(AttentionKind)
TYPES: list[KVCacheQuantType | None] = list(STORAGE_DTYPES)
COMBINATIONS = list(itertools.product(KINDS, TYPES, MODEL_DTYPES))
LEGAL = [c for c in COMBINATIONS if STORAGE_DTYPES[c[1]].is_legal_with(c[0])]
ILLEGAL = [c for c in COMBINATIONS if not STORAGE_DTYPES[c[1]].is_legal_with(c[0])]

# Written out by hand and not read from the code under test: what a role's memory must be.
SCALE_ROLES = {Role.KEY_SCALE, Role.VALUE_SCALE}
DYNAMIC = (KVCacheQuantType.BLOCK_WISE_FP8, KVCacheQuantType.INT8_TOKEN)


def expected_dtype(kind: AttentionKind, role: Role, quant_type: KVCacheQuantType | None, model_dtype: str) -> str:
    if role in SCALE_ROLES:
        return "float32"
    return model_dtype if quant_type is None and kind is not AttentionKind.DSA else "uint8"


def expected_roles(kind: AttentionKind, quant_type: KVCacheQuantType | None) -> list[Role]:
    if kind is AttentionKind.MLA:
        return [Role.LATENT]
    if kind is AttentionKind.DSA:
        return [Role.KEY, Role.INDEXER]
    scales = [Role.KEY_SCALE, Role.VALUE_SCALE] if quant_type in DYNAMIC else []
    return [Role.KEY, Role.VALUE, *scales]


def expected_shape(kind: AttentionKind, role: Role, quant_type: KVCacheQuantType | None, blocks: int) -> list[int]:
    """The toy's shapes: block_size 4, 2 KV heads of 8; MLA 16 + 8; DSA 128 + 16 and an indexer of 128."""
    if role is Role.LATENT:
        return [blocks, 1, 4, 24]
    if role is Role.INDEXER:
        return [blocks, 4, 128 + 4]
    if kind is AttentionKind.DSA:
        return [blocks, 1, 4, 128 + 4 + 16 * 2]
    if role in SCALE_ROLES:
        return [blocks, 2, 4]
    return [blocks, 2, 4, 4 if quant_type is KVCacheQuantType.INT4_ZP else 8]


def numpy_bytes(tensor: paddle.Tensor) -> int:
    """Bytes of a tensor by another road than fastkv's: Paddle copies it out (bfloat16 as uint16), NumPy counts."""
    return int(tensor.numpy().nbytes)


@pytest.mark.parametrize("manager", ["v0", "v1"])
@pytest.mark.parametrize(("kind", "quant_type", "model_dtype"), LEGAL)
def test_storage_dtype_every_legal_cache_is_stored_as_its_type_says(
    kind: AttentionKind, quant_type: KVCacheQuantType | None, model_dtype: str, manager: str
) -> None:
    config = toy_config(kind.value, dtype=model_dtype, quant_type=quant_type, manager=manager)
    spec = config.cache_spec()
    if manager == "v0":
        runner = RunnerCache(spec, num_blocks=4)
        groups = {name: runner.flat_list(name) for name in ("main", "mtp")}
        owner: RunnerCache | CacheController = runner
    else:
        controller = CacheController(config)
        controller.initialize_all()
        tensors = list(controller.get_kv_caches().values())
        per_layer = len(expected_roles(kind, quant_type))
        groups = {"main": tensors[: 2 * per_layer], "mtp": tensors[2 * per_layer :]}
        owner = controller
        host = controller.host_records
        assert host.shape == (3, spec.record_stride_bytes)
        assert host.dtype == np.uint8
        assert host.ctypes.data % 4096 == 0
        assert controller.host_bytes == spec.payload_bytes(Level.HOST, 3) <= host.nbytes

    total = 0
    for name, layers in (("main", 2), ("mtp", 1)):
        roles = expected_roles(kind, quant_type) * layers
        assert len(groups[name]) == len(roles)
        for role, tensor in zip(roles, groups[name], strict=True):
            assert tensor.dtype == getattr(paddle, expected_dtype(kind, role, quant_type, model_dtype))
            assert list(tensor.shape) == expected_shape(kind, role, quant_type, 4)
            assert tensor.is_contiguous()
        held = sum(numpy_bytes(tensor) for tensor in groups[name])
        assert held == owner.group_bytes(name) == config.capacity_plan().group_bytes(name)
        total += held
    assert total == spec.payload_bytes(Level.DEVICE, 4) == config.capacity_plan().device_bytes


@pytest.mark.parametrize("manager", ["v0", "v1"])
@pytest.mark.parametrize(("kind", "quant_type", "model_dtype"), ILLEGAL)
def test_storage_dtype_every_illegal_combination_is_a_config_error(
    kind: AttentionKind, quant_type: KVCacheQuantType, model_dtype: str, manager: str
) -> None:
    data = toy_data(kind.value, dtype=model_dtype, quant_type=quant_type.value, manager=manager)
    with pytest.raises(ConfigError, match=rf"{quant_type.value} is not supported with {kind.value} attention"):
        parse_config(data)


@pytest.mark.parametrize(("kind", "quant_type", "model_dtype"), LEGAL)
def test_v0_and_v1_allocate_byte_for_byte_the_same(
    kind: AttentionKind, quant_type: KVCacheQuantType | None, model_dtype: str
) -> None:
    config = toy_config(kind.value, dtype=model_dtype, quant_type=quant_type)
    controller = CacheController(config)
    controller.initialize_all()
    runner = RunnerCache(config.cache_spec(), num_blocks=4)
    mine = runner.flat_list("main") + runner.flat_list("mtp")
    theirs = list(controller.get_kv_caches().values())
    assert [(t.dtype, list(t.shape)) for t in mine] == [(t.dtype, list(t.shape)) for t in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("quant_type", TYPES)
def test_byte_counts_of_the_expand_ratio_are_the_tensors(quant_type: KVCacheQuantType | None) -> None:
    data = toy_data(quant_type=quant_type.value if quant_type else None)
    data["speculation"]["block_expand_ratio"] = 3
    config = parse_config(data)
    controller = CacheController(config)
    controller.initialize_all()
    held = sum(numpy_bytes(tensor) for tensor in controller.get_kv_caches().values())
    assert held == config.capacity_plan().device_bytes
    assert (
        controller.group_bytes("mtp")
        == config.capacity_plan().group_bytes("mtp")
        == 3 * controller.group_bytes("main") // 2
    )


@pytest.mark.parametrize(("kv_heads", "tp_size", "share"), [(2, 4, 1), (8, 8, 1), (8, 2, 4)])
def test_heads_under_tp_reach_the_tensors(kv_heads: int, tp_size: int, share: int) -> None:
    data = toy_data(tp_size=tp_size)
    data["model"].update(num_kv_heads=kv_heads, num_attention_heads=8)
    config = parse_config(data)
    for rank in range(tp_size):
        controller = CacheController(config, rank)
        controller.initialize_all()
        assert {tensor.shape[1] for tensor in controller.get_kv_caches().values()} == {share}


@pytest.mark.parametrize(("kv_heads", "heads", "tp_size"), [(6, 24, 4), (3, 12, 4)])
def test_heads_under_tp_that_would_be_lost_are_refused(kv_heads: int, heads: int, tp_size: int) -> None:
    data = toy_data(tp_size=tp_size)
    data["model"].update(num_kv_heads=kv_heads, num_attention_heads=heads)
    with pytest.raises(ConfigError, match=f"num_kv_heads {kv_heads} and tensor_parallel_size {tp_size}"):
        parse_config(data)


@pytest.mark.parametrize("quant_type", ["int8", "block_wise_fp8"])
def test_storage_dtype_op_refuses_a_cache_in_the_logical_dtype(quant_type: str) -> None:
    """What FastDeploy's kernel aborted on is here an error that names both sides, before anything runs."""
    from fastkv.ops import LayerCache, StaticScales

    storage = toy_config(quant_type=quant_type).cache_spec().storage
    cache = paddle.zeros([4, 2, 4, 8], dtype="bfloat16")
    scale = paddle.zeros([4, 2, 4]) if quant_type == "block_wise_fp8" else None
    static = StaticScales(np.ones(16, np.float32), np.ones(16, np.float32)) if scale is None else None
    with pytest.raises(ConfigError, match=rf"{quant_type} stores uint8, but key_cache is .*bfloat16"):
        LayerCache(storage, cache, cache, scale, scale, static)
