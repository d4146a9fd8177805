"""StorageNamespace: everything that makes stored bytes interpretable, and its digest.

A record's key is namespace digest + prefix digest + rank; no rank where every rank holds the same bytes. Two engines
share records exactly if all fields below are equal. Whoever opens a connector or a lookup builds one from the
CacheSpec with `from_spec`.

The digest is SHA-256 over an encoding in which no two different values share bytes. Anybody can recompute it:

    digest = SHA-256( "fastkv.storage.namespace" 0x00 || encode([[name, value], ...]) )   fields in declaration order

    encode(None) = "N"                  encode(int)   = "i" u64(len) decimal ASCII
    encode(bool) = "T" or "F"           encode(float) = "f" IEEE-754 binary64
    encode(str)  = "s" u64(len) UTF-8   encode(list or tuple) = "l" u64(count) items...

Numbers in the encoding are big-endian. Every item says its type and length first, so the whole is self-delimiting and
neither a moved boundary nor an int that looks like a string can collide.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import msgspec
import numpy as np
import numpy.typing as npt

from fastkv.core.dtype import ScaleKind
from fastkv.core.spec import CacheSpec
from fastkv.errors import ConfigError
from fastkv.storage.base import check_digests

LAYOUT_VERSION = 1
"""Version of the record layout that CacheSpec.record_parts describes. Raise it when the layout changes."""

Scalar = bool | int | float | str | None

_DOMAIN = b"fastkv.storage.namespace\x00"
_U64 = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class StoredRole:
    """One role of a layer group as it is stored: dtype, and shape of one block."""

    role: str
    dtype: str
    block_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One layer group as it is stored."""

    name: str
    attention: str
    first_layer: int
    num_layers: int
    kv_heads: int
    roles: tuple[StoredRole, ...]


@dataclass(frozen=True, slots=True)
class StorageNamespace:
    """What besides the prefix decides a record's bytes. All fields take part in the digest.

    Attributes:
        model, revision: which model.
        weights_version, mtp_weights_version: which weights, of the main model and of the MTP layers ("" without).
        rope: rotary parameters as sorted (name, value) pairs; numbers as floats.
        logical_dtype, storage_dtype: what the model computes in, what keys and values are stored in.
        quant_type, scale_granularity: how they are quantised.
        scales_digest: names the static scales of all ranks ("" when there are none).
        block_size: tokens a block.
        groups: main and, if there are any, MTP layers with their roles and the kv heads of one rank.
        tp_size: tensor-parallel ranks.
        is_replicated: every rank holds the same bytes.
        layout_version, record_bytes: layout and length of a host record.
    """

    model: str
    revision: str
    weights_version: str
    mtp_weights_version: str
    rope: tuple[tuple[str, Scalar], ...]
    logical_dtype: str
    storage_dtype: str
    quant_type: str
    scale_granularity: str
    scales_digest: str
    block_size: int
    groups: tuple[StoredGroup, ...]
    tp_size: int
    is_replicated: bool
    layout_version: int
    record_bytes: int

    @classmethod
    def from_spec(
        cls,
        spec: CacheSpec,
        *,
        model: str,
        revision: str = "",
        weights_version: str | int = "",
        mtp_weights_version: str | int = "",
        rope: Mapping[str, Scalar] | None = None,
        scales_digest: str = "",
    ) -> StorageNamespace:
        """The namespace of a CacheSpec plus what the spec does not know.

        Args:
            spec: layout, dtypes, heads, tensor parallelism.
            model, revision: names of the model; a fingerprint of the weights is a good revision.
            weights_version, mtp_weights_version: raised whenever weights change under the same name.
            rope: rotary parameters, flat. 10000 and 10000.0 are the same.
            scales_digest: of the static scales of the *whole* model, so that all ranks agree; see `digest_scales`.

        Raises:
            ConfigError: empty model, static scales without a digest or a digest without static scales, a rotary
                parameter that is no finite scalar.
        """
        if not model:
            raise ConfigError("storage needs the model's name: without it records of two models would share keys")
        has_scales = spec.storage.scales is ScaleKind.STATIC
        if has_scales != bool(scales_digest):
            raise ConfigError(
                f"kv_cache_quant_type {spec.storage.name} has {'' if has_scales else 'no '}static scales, but the "
                f"scales digest is {scales_digest!r}; give the digest of exactly the scales that are in use"
            )
        groups = tuple(
            StoredGroup(
                group.name,
                group.geometry.kind.value,
                group.first_layer,
                group.num_layers,
                group.kv_heads,
                tuple(StoredRole(role.role.value, role.dtype, role.block_shape) for role in group.roles),
            )
            for group in spec.groups
        )
        return cls(
            model=model,
            revision=revision,
            weights_version=str(weights_version),
            mtp_weights_version=str(mtp_weights_version),
            rope=tuple(sorted((name, _rope_value(name, value)) for name, value in (rope or {}).items())),
            logical_dtype=spec.model_dtype,
            storage_dtype=spec.cache_dtype,
            quant_type=spec.storage.name,
            scale_granularity=spec.scale_granularity.value if spec.scale_granularity else "",
            scales_digest=scales_digest,
            block_size=spec.block_size,
            groups=groups,
            tp_size=spec.tp_size,
            is_replicated=spec.is_replicated,
            layout_version=LAYOUT_VERSION,
            record_bytes=spec.record_stride_bytes,
        )

    def with_weights_version(self, version: str | int, mtp_version: str | int | None = None) -> StorageNamespace:
        """The namespace after the weights changed: nothing stored before is found in it."""
        mtp = self.mtp_weights_version if mtp_version is None else str(mtp_version)
        return replace(self, weights_version=str(version), mtp_weights_version=mtp)

    @property
    def digest(self) -> bytes:
        """32 bytes that name the namespace."""
        named = [[field.name, getattr(self, field.name)] for field in fields(self)]
        return hashlib.sha256(_DOMAIN + _encode(named)).digest()

    @property
    def num_writers(self) -> int:
        """Ranks that store records: all of them, or rank 0 alone where their bytes are the same."""
        return 1 if self.is_replicated else self.tp_size

    def writer_rank(self, rank: int) -> int:
        """The rank that stores what rank holds.

        Raises:
            ConfigError: no such rank.
        """
        if not 0 <= rank < self.tp_size:
            raise ConfigError(f"rank {rank} is not one of the {self.tp_size} tensor-parallel ranks")
        return 0 if self.is_replicated else rank

    def record_key(self, prefix_digest: bytes, rank: int) -> bytes:
        """The key of one record, for backends with one flat key space.

        Returns:
            namespace digest (32 bytes) + prefix digest (32 bytes) + rank (u32, big-endian; left out if replicated).
        """
        check_digests([prefix_digest])
        self.writer_rank(rank)
        return self.digest + prefix_digest + (b"" if self.is_replicated else struct.pack(">I", rank))

    def to_json(self) -> bytes:
        """A description for people, and for `from_json`."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> StorageNamespace:
        """The namespace that `to_json` described.

        Raises:
            ConfigError: not such a description.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"not the description of a storage namespace: {error}") from error


def digest_scales(scales: Mapping[str, npt.NDArray[np.generic]]) -> str:
    """Name static scales: hex SHA-256 over names, dtypes, shapes and little-endian bytes.

    Args:
        scales: name -> array, of the whole model (before sharding by rank).
    """
    hasher = hashlib.sha256(b"fastkv.storage.scales\x00")
    for name in sorted(scales):
        array = np.ascontiguousarray(scales[name])
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        hasher.update(_encode([name, array.dtype.str, list(array.shape)]))
        hasher.update(array.tobytes())
    return hasher.hexdigest()


def _rope_value(name: str, value: object) -> Scalar:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    raise ConfigError(f"rotary parameter {name} = {value!r} must be a finite number, a string, true, false or null")


def _encode(value: object) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        text = str(value).encode()
        return b"i" + _U64.pack(len(text)) + text
    if isinstance(value, float):
        return b"f" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return b"s" + _U64.pack(len(data)) + data
    if isinstance(value, (list, tuple)):
        return b"l" + _U64.pack(len(value)) + b"".join(_encode(item) for item in value)
    if isinstance(value, (StoredGroup, StoredRole)):
        return _encode([[field.name, getattr(value, field.name)] for field in fields(value)])
    raise ConfigError(f"a storage namespace cannot hold {value!r} of type {type(value).__name__}")
