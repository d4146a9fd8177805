"""CacheSpec: roles, shapes, strides, byte counts; the fault kinds "storage dtype", "byte counts", "heads under TP"."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from helpers.toy import toy_config
from hypothesis import given
from hypothesis import strategies as st

from fastkv.core.dtype import AttentionKind, ScaleGranularity, itemsize
from fastkv.core.geometry import AttentionGeometry, kv_heads_per_rank
from fastkv.core.spec import RECORD_ALIGN_BYTES, ROLE_ALIGN_BYTES, CacheSpec, Level, Role, RoleSpec
from fastkv.errors import ConfigError

GQA = AttentionGeometry(AttentionKind.GQA, 2, num_kv_heads=2, head_dim=8)


def build(**options: object) -> CacheSpec:
    return CacheSpec.build(**{"main": GQA, "model_dtype": "bfloat16", "block_size": 4, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quant_type", "block_bytes"),
    [(None, 768), ("int8", 384), ("int8_zp", 384), ("fp8", 384), ("fp8_zp", 384), ("int4_zp", 192)]
    + [("block_wise_fp8", 576)],
)
def test_byte_counts_of_the_toy_follow_the_stored_bytes(quant_type: str | None, block_bytes: int) -> None:
    """vLLM#46985, FastDeploy#6438, kvcached#424: bytes were counted from the logical dtype."""
    spec = toy_config(quant_type=quant_type).cache_spec()
    assert spec.block_bytes == block_bytes
    assert spec.payload_bytes(Level.DEVICE, 7) == spec.payload_bytes(Level.HOST, 7) == 7 * block_bytes


def test_storage_dtype_int4_halves_the_last_dimension_and_refuses_an_odd_one() -> None:
    key = build(kv_cache_quant_type="int4_zp").group("main").role(Role.KEY)
    assert key == RoleSpec(Role.KEY, "uint8", (2, 4, 4))
    odd = AttentionGeometry(AttentionKind.GQA, 2, num_kv_heads=2, head_dim=7)
    with pytest.raises(ConfigError, match="head_dim 7 is odd.*int4_zp"):
        build(main=odd, kv_cache_quant_type="int4_zp")
    odd_value = AttentionGeometry(AttentionKind.GQA, 2, num_kv_heads=2, head_dim=8, v_head_dim=5)
    with pytest.raises(ConfigError, match="v_head_dim 5 is odd"):
        build(main=odd_value, kv_cache_quant_type="int4_zp")


def test_storage_dtype_mla_has_no_value_and_dsa_is_uint8_though_nothing_is_quantised() -> None:
    mla = toy_config("mla").cache_spec().group("main")
    assert [(r.role, r.dtype, r.block_shape) for r in mla.roles] == [(Role.LATENT, "bfloat16", (1, 4, 24))]
    real = AttentionGeometry(AttentionKind.DSA, 1, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    dsa = build(main=real, block_size=64).group("main")
    assert dsa.role(Role.KEY) == RoleSpec(Role.KEY, "uint8", (1, 64, 656))
    assert dsa.role(Role.INDEXER) == RoleSpec(Role.INDEXER, "uint8", (64, 132))
    assert dsa.role(Role.VALUE) is None


def test_dynamic_scales_are_roles_of_the_cache() -> None:
    main = build(kv_cache_quant_type="block_wise_fp8").group("main")
    assert [r.role for r in main.roles] == [Role.KEY, Role.VALUE, Role.KEY_SCALE, Role.VALUE_SCALE]
    assert main.role(Role.KEY_SCALE) == RoleSpec(Role.KEY_SCALE, "float32", (2, 4))


def test_value_head_dim_may_differ_from_the_keys() -> None:
    geometry = AttentionGeometry(AttentionKind.GQA, 1, num_kv_heads=2, head_dim=192, v_head_dim=128)
    main = build(main=geometry).group("main")
    assert [r.block_shape for r in main.roles] == [(2, 4, 192), (2, 4, 128)]


@pytest.mark.parametrize(("kv_heads", "tp_size", "expected"), [(2, 4, 1), (8, 8, 1), (8, 2, 4), (1, 1, 1), (1, 8, 1)])
def test_heads_under_tp_are_shared_or_replicated(kv_heads: int, tp_size: int, expected: int) -> None:
    assert kv_heads_per_rank(kv_heads, tp_size) == expected


@pytest.mark.parametrize(("kv_heads", "tp_size"), [(6, 4), (3, 4), (3, 2), (0, 1), (2, 0), (-2, 1)])
def test_heads_under_tp_that_do_not_divide_are_refused(kv_heads: int, tp_size: int) -> None:
    """FastDeploy#3717: heads were truncated; vllm-ascend#3366: to zero."""
    with pytest.raises(ConfigError) as error:
        kv_heads_per_rank(kv_heads, tp_size)
    assert str(kv_heads) in str(error.value)
    assert str(tp_size) in str(error.value)


@given(st.integers(1, 128), st.integers(1, 64))
def test_heads_under_tp_never_lose_or_invent_a_head(kv_heads: int, tp_size: int) -> None:
    try:
        share = kv_heads_per_rank(kv_heads, tp_size)
    except ConfigError:
        assert kv_heads % tp_size
        assert tp_size % kv_heads
        return
    assert share * tp_size == max(kv_heads, tp_size)


def test_expand_ratio_counts_on_the_device_only() -> None:
    mtp = AttentionGeometry(AttentionKind.GQA, 1, num_kv_heads=2, head_dim=8)
    spec = build(mtp=mtp, mtp_expand_ratio=3)
    main, draft = spec.group("main").block_bytes, spec.group("mtp").block_bytes
    assert spec.payload_bytes(Level.DEVICE, 5) == 5 * (main + 3 * draft)
    assert spec.payload_bytes(Level.HOST, 5) == 5 * (main + draft)
    assert spec.group("mtp").num_blocks(5) == 15
    assert list(spec.group("mtp").layers) == [2]


def test_offsets_are_64_bit() -> None:
    """flashinfer#3130, vLLM#50427: block 1,048,576 x stride 16,384 overflowed 32 bits."""
    role = RoleSpec(Role.KEY, "uint8", (1, 64, 256))
    assert role.strides_bytes()[0] * 1_048_576 == 2**34
    assert role.shape(1_048_577)[0] == 1_048_577


@given(
    quant_type=st.sampled_from([None, "int8", "int4_zp", "block_wise_fp8"]),
    block_size=st.integers(1, 64),
    head_dim=st.integers(1, 48).map(lambda n: 2 * n),
    kv_heads=st.integers(1, 5),
    mtp_layers=st.integers(0, 2),
)
def test_records_hold_every_role_once_aligned_and_without_overlap(
    quant_type: str | None, block_size: int, head_dim: int, kv_heads: int, mtp_layers: int
) -> None:
    main = AttentionGeometry(AttentionKind.GQA, 3, num_kv_heads=kv_heads, head_dim=head_dim)
    mtp = (
        AttentionGeometry(AttentionKind.GQA, mtp_layers, num_kv_heads=kv_heads, head_dim=head_dim)
        if mtp_layers
        else None
    )
    spec = build(main=main, mtp=mtp, kv_cache_quant_type=quant_type, block_size=block_size)
    parts = spec.record_parts
    assert [(p.layer, p.role.role) for p in parts] == [(layer, r.role) for _, layer, r in spec.iter_roles()]
    assert all(p.offset % ROLE_ALIGN_BYTES == 0 for p in parts)
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(parts))
    assert parts[-1].offset + parts[-1].nbytes <= spec.record_stride_bytes
    assert spec.record_stride_bytes % RECORD_ALIGN_BYTES == 0
    assert sum(p.nbytes for p in parts) == spec.block_bytes
    for part in parts:
        assert part.nbytes == math.prod(part.role.block_shape) * itemsize(part.role.dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1 .* got 0"),
        ({"main": AttentionGeometry(AttentionKind.MLA, 1, kv_lora_rank=8, qk_rope_head_dim=4)}, None),
        ({"kv_cache_quant_type": "int8", "scale_granularity": ScaleGranularity.TENSOR}, "allowed: channel, head"),
        ({"scale_granularity": ScaleGranularity.HEAD}, "it has no scales"),
        ({"mtp": GQA, "mtp_expand_ratio": 0}, "mtp_expand_ratio must be at least 1"),
    ],
)
def test_build_refuses_impossible_combinations(options: dict[str, object], message: str | None) -> None:
    if message is None:
        options = {**options, "kv_cache_quant_type": "int8"}
        message = "int8 is not supported with mla attention; allowed with mla: none, float8_e4m3fn"
    with pytest.raises(ConfigError, match=message):
        build(**options)


@pytest.mark.parametrize(
    "fields", [{"num_layers": 0}, {"num_kv_heads": 0}, {"head_dim": 0}, {"kind": AttentionKind.MLA, "num_layers": 1}]
)
def test_geometry_without_a_needed_dimension_is_refused(fields: dict[str, object]) -> None:
    full = {"kind": AttentionKind.GQA, "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ConfigError, match="needs"):
        AttentionGeometry(**{**full, **fields})  # type: ignore[arg-type]


def test_mtp_of_another_kind_takes_the_granularity_that_was_asked() -> None:
    mtp = AttentionGeometry(AttentionKind.MHA, 1, num_kv_heads=4, head_dim=8)
    spec = build(mtp=mtp, kv_cache_quant_type="int8", scale_granularity=ScaleGranularity.HEAD)
    assert spec.scale_granularity is ScaleGranularity.HEAD
    latent = AttentionGeometry(AttentionKind.MLA, 1, kv_lora_rank=16, qk_rope_head_dim=8)
    with pytest.raises(ConfigError, match="channel is not possible for float8_e4m3fn with mla"):
        build(mtp=latent, kv_cache_quant_type="fp8")


def test_unknown_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no layer group 'mtp'; this model has: main"):
        build().group("mtp")


def test_cache_dtype_is_what_the_key_tensors_hold() -> None:
    assert toy_config().cache_spec().cache_dtype == "bfloat16"
    assert toy_config(quant_type="int8").cache_spec().cache_dtype == "uint8"
    assert toy_config("mla").cache_spec().cache_dtype == "bfloat16"
    assert toy_config("dsa").cache_spec().cache_dtype == "uint8"
