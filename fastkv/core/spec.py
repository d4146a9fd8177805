"""CacheSpec: the one description of every byte of KV cache.

Built once from the config. Allocation (v0 and v1, main and MTP, device and host), byte accounting, planning, swap,
storage records and the attention ops all read it; nobody else computes a dtype, a shape or a size.

A spec is per block and immutable. How many blocks there are comes later (profiled, the minimum over ranks) and is
always a separate argument.

On the device a layer's role is one tensor, contiguous over blocks. On the host a *block* is one record:

    | main layer 0: role 0, role 1, ... | main layer 1: ... | mtp layer 0: ... | padding | next block's record
    ^ every role starts on 16 bytes                                            ^ stride is a multiple of 64
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property

from fastkv.core.dtype import (
    CODE_DTYPE,
    SCALE_DTYPE,
    STORAGE_DTYPES,
    AttentionKind,
    KVCacheQuantType,
    ScaleGranularity,
    ScaleKind,
    StorageDtype,
    check_legal,
    itemsize,
    packed_dim,
    parse_quant_type,
    resolve_cache_dtype,
)
from fastkv.core.geometry import DSA_SCALE_GROUP, AttentionGeometry, kv_heads_per_rank
from fastkv.errors import ConfigError

ROLE_ALIGN_BYTES = 16
MAX_BLOCK_SIZE = 2**20
RECORD_ALIGN_BYTES = 64  # a cache line: records can be written with non-temporal stores
_DSA_ROPE_BYTES = 2  # its rotary part stays in 16 bits


class Level(IntEnum):
    """Where a block's bytes are; a smaller level is faster."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2


class Role(str, Enum):
    """One kind of tensor that a layer keeps."""

    KEY = "key"
    VALUE = "value"
    KEY_SCALE = "key_scale"
    VALUE_SCALE = "value_scale"
    LATENT = "latent"
    INDEXER = "indexer"


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role of one layer: dtype and shape of a block.

    Attributes:
        role: which role.
        dtype: storage dtype of the tensor.
        block_shape: shape of one block; the tensor is [num_blocks, *block_shape], row-major.
    """

    role: Role
    dtype: str
    block_shape: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this role in one layer."""
        return math.prod(self.block_shape) * itemsize(self.dtype)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the device tensor for num_blocks blocks."""
        return (num_blocks, *self.block_shape)

    def strides_bytes(self) -> tuple[int, ...]:
        """Byte strides of the device tensor, block axis first. Python ints: they do not overflow."""
        strides = [itemsize(self.dtype)]
        for dim in reversed(self.block_shape):
            strides.append(strides[-1] * dim)
        return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one layout: "main", or "mtp" when the model speculates with its own layers.

    Attributes:
        name: "main" or "mtp".
        first_layer: id of the group's first layer; MTP's ids follow the main model's.
        geometry: whole-model geometry.
        kv_heads: KV heads on one rank (1 under MLA and DSA: ranks hold the same bytes).
        roles: roles of each layer, in record order.
        expand_ratio: device blocks of this group for each block of the pool; ids past the pool are the proposer's
            scratch.
    """

    name: str
    first_layer: int
    geometry: AttentionGeometry
    kv_heads: int
    roles: tuple[RoleSpec, ...]
    expand_ratio: int = 1

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        return self.geometry.num_layers

    @property
    def layers(self) -> range:
        """Global layer ids."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, all roles."""
        return sum(role.block_bytes for role in self.roles)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and roles."""
        return self.layer_block_bytes * self.num_layers

    def num_blocks(self, pool_blocks: int) -> int:
        """Device blocks of this group for a pool of pool_blocks."""
        return pool_blocks * self.expand_ratio

    def role(self, role: Role) -> RoleSpec | None:
        """The spec of a role, or None where layers of this group keep no such tensor."""
        return next((spec for spec in self.roles if spec.role is role), None)


@dataclass(frozen=True, slots=True)
class RecordPart:
    """Where one role of one layer lies inside a host record."""

    group: str
    layer: int
    role: RoleSpec
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part, without padding."""
        return self.role.block_bytes


@dataclass(frozen=True)
class CacheSpec:
    """Every dtype, shape and byte count of the KV caches of one rank. Make one with `build`.

    Attributes:
        model_dtype: logical dtype, what the model computes in.
        storage: the row of the quantisation table that the caches are stored by.
        scale_granularity: of static scales; TOKEN for dynamic ones; None when nothing is scaled.
        block_size: tokens of one block.
        tp_size: tensor-parallel ranks.
        groups: main, then mtp when the model speculates.
    """

    model_dtype: str
    storage: StorageDtype
    scale_granularity: ScaleGranularity | None
    block_size: int
    tp_size: int
    groups: tuple[LayerGroup, ...] = field(default=())

    @classmethod
    def build(
        cls,
        main: AttentionGeometry,
        *,
        model_dtype: str,
        kv_cache_quant_type: str | KVCacheQuantType | None = None,
        block_size: int,
        mtp: AttentionGeometry | None = None,
        mtp_expand_ratio: int = 1,
        tp_size: int = 1,
        scale_granularity: ScaleGranularity | None = None,
    ) -> CacheSpec:
        """Derive the spec from geometry and quantisation type.

        Args:
            main, mtp: geometry of the main model and, if it speculates with layers of its own, of those.
            model_dtype: logical dtype.
            kv_cache_quant_type: type, name, alias, or None.
            block_size: tokens a block.
            mtp_expand_ratio: MTP device blocks for each block of the pool.
            tp_size: tensor-parallel ranks.
            scale_granularity: of static scales; None takes the first that is legal (per channel, MLA per tensor).

        Raises:
            ConfigError: any combination that the table of legal combinations does not list, odd dims under a packed
                type, heads that do not divide, non-positive sizes.
        """
        storage = STORAGE_DTYPES[parse_quant_type(kv_cache_quant_type)]
        cache_dtype = resolve_cache_dtype(storage.quant_type, model_dtype)
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size must be at least 1 and at most {MAX_BLOCK_SIZE} tokens, got {block_size}")
        if mtp_expand_ratio < 1:
            raise ConfigError(f"mtp_expand_ratio must be at least 1, got {mtp_expand_ratio}")
        granularity = _resolve_granularity(storage, main.kind, scale_granularity)
        groups = [_layer_group("main", 0, main, storage, cache_dtype, block_size, tp_size, 1)]
        if mtp is not None:
            _resolve_granularity(storage, mtp.kind, granularity)
            groups.append(
                _layer_group("mtp", main.num_layers, mtp, storage, cache_dtype, block_size, tp_size, mtp_expand_ratio)
            )
        return cls(model_dtype, storage, granularity, block_size, tp_size, tuple(groups))

    def group(self, name: str) -> LayerGroup:
        """The layer group called name.

        Raises:
            ConfigError: the spec has no such group.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise ConfigError(f"no layer group {name!r}; this model has: {', '.join(g.name for g in self.groups)}")

    @property
    def has_mtp(self) -> bool:
        """Whether there are MTP layers."""
        return any(group.name == "mtp" for group in self.groups)

    @property
    def cache_dtype(self) -> str:
        """Storage dtype of keys (or latents): the model's, or uint8 when quantised and always under DSA."""
        return self.groups[0].roles[0].dtype

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block over all groups (what a host record carries)."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def pool_block_bytes(self) -> int:
        """Device bytes that one block of the pool costs, the groups' expand ratios included."""
        return sum(group.block_bytes * group.expand_ratio for group in self.groups)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the same bytes (MLA and DSA latents)."""
        return all(group.geometry.kind in (AttentionKind.MLA, AttentionKind.DSA) for group in self.groups)

    def payload_bytes(self, level: Level, num_blocks: int) -> int:
        """Bytes that num_blocks blocks hold at a level: what the roles hold, without padding.

        Args:
            level: on DEVICE the groups' expand ratios count; a HOST or STORAGE block is one record.
            num_blocks: blocks of the pool at that level.
        """
        return num_blocks * (self.pool_block_bytes if level is Level.DEVICE else self.block_bytes)

    @cached_property
    def record_parts(self) -> tuple[RecordPart, ...]:
        """Layout of one host record: layer after layer, role after role."""
        parts, offset = [], 0
        for group, layer, role in self.iter_roles():
            parts.append(RecordPart(group.name, layer, role, offset))
            offset = _align(offset + role.block_bytes, ROLE_ALIGN_BYTES)
        return tuple(parts)

    @cached_property
    def record_stride_bytes(self) -> int:
        """Distance between two host records."""
        last = self.record_parts[-1]
        return _align(last.offset + last.nbytes, RECORD_ALIGN_BYTES)

    def iter_roles(self) -> Iterator[tuple[LayerGroup, int, RoleSpec]]:
        """(group, global layer id, role) of everything that is stored, in record order."""
        for group in self.groups:
            for layer in group.layers:
                for role in group.roles:
                    yield group, layer, role


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _resolve_granularity(
    storage: StorageDtype, kind: AttentionKind, asked: ScaleGranularity | None
) -> ScaleGranularity | None:
    check_legal(storage, kind)
    legal = storage.granularities[kind]
    if asked is None:
        return legal[0] if legal else None
    if asked not in legal:
        allowed = ", ".join(g.value for g in legal) or "none (it has no scales)"
        raise ConfigError(
            f"scale_granularity {asked.value} is not possible for {storage.name} with {kind.value} attention; "
            f"allowed: {allowed}"
        )
    return asked


def _layer_group(
    name: str,
    first_layer: int,
    geometry: AttentionGeometry,
    storage: StorageDtype,
    cache_dtype: str,
    block_size: int,
    tp_size: int,
    expand_ratio: int,
) -> LayerGroup:
    check_legal(storage, geometry.kind)
    if geometry.kind is AttentionKind.MLA:
        width = packed_dim(storage, geometry.latent_dim, "kv_lora_rank + qk_rope_head_dim")
        latent = RoleSpec(Role.LATENT, cache_dtype, (1, block_size, width))
        return LayerGroup(name, first_layer, geometry, 1, (latent,), expand_ratio)
    if geometry.kind is AttentionKind.DSA:
        return LayerGroup(name, first_layer, geometry, 1, _dsa_roles(geometry, block_size), expand_ratio)
    kv_heads = kv_heads_per_rank(geometry.num_kv_heads, tp_size)
    key_dim = packed_dim(storage, geometry.head_dim, "head_dim")
    value_dim = packed_dim(storage, geometry.value_dim, "v_head_dim" if geometry.v_head_dim else "head_dim")
    roles: tuple[RoleSpec, ...] = (
        RoleSpec(Role.KEY, cache_dtype, (kv_heads, block_size, key_dim)),
        RoleSpec(Role.VALUE, cache_dtype, (kv_heads, block_size, value_dim)),
    )
    if storage.scales is ScaleKind.DYNAMIC:
        roles += (
            RoleSpec(Role.KEY_SCALE, SCALE_DTYPE, (kv_heads, block_size)),
            RoleSpec(Role.VALUE_SCALE, SCALE_DTYPE, (kv_heads, block_size)),
        )
    return LayerGroup(name, first_layer, geometry, kv_heads, roles, expand_ratio)


def _dsa_roles(geometry: AttentionGeometry, block_size: int) -> tuple[RoleSpec, ...]:
    """DSA's own format, uint8 whatever the quantisation type: fp8 values, their float32 scales, 16-bit rotary part."""
    scale_bytes = itemsize(SCALE_DTYPE)
    key_bytes = (
        geometry.kv_lora_rank
        + geometry.kv_lora_rank // DSA_SCALE_GROUP * scale_bytes
        + geometry.qk_rope_head_dim * _DSA_ROPE_BYTES
    )
    index_bytes = geometry.index_head_dim + geometry.index_head_dim // DSA_SCALE_GROUP * scale_bytes
    return (
        RoleSpec(Role.KEY, CODE_DTYPE, (1, block_size, key_bytes)),
        RoleSpec(Role.INDEXER, CODE_DTYPE, (block_size, index_bytes)),
    )
