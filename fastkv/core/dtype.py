"""The one place that decides what dtype a KV cache is stored in.

Owns the quantisation types and one table, STORAGE_DTYPES, with a row for each: bits, packing, scales, bound, zero
point, and the attention kinds it is legal with. Called by `CacheSpec` only; the v0 and the v1 path both allocate
from a CacheSpec. Logical dtype is what the model computes in; storage dtype is what memory holds. They differ as soon
as a quantisation type is set: then memory holds uint8 codes.

Adding a type: a member of KVCacheQuantType, a row of STORAGE_DTYPES, a codec in custom_ops/include/fastkv/codec.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from fastkv.errors import ConfigError


class KVCacheQuantType(str, Enum):
    """How keys and values are quantised in the cache. None (no member) means: stored in the model's dtype."""

    INT8 = "int8"
    INT8_ZP = "int8_zp"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FN_ZP = "float8_e4m3fn_zp"
    BLOCK_WISE_FP8 = "block_wise_fp8"
    INT4_ZP = "int4_zp"
    INT8_TOKEN = "int8_token"


class AttentionKind(str, Enum):
    """Which attention a model uses, hence which roles a layer keeps."""

    MHA = "mha"
    GQA = "gqa"
    MLA = "mla"
    DSA = "dsa"


class ScaleKind(str, Enum):
    """Where the scales of a quantised cache live."""

    NONE = "none"  # not quantised
    STATIC = "static"  # calibrated once, owned by whoever owns the caches
    DYNAMIC = "dynamic"  # computed at every write, kept in cache roles of their own


class ScaleGranularity(str, Enum):
    """How many elements share one scale."""

    CHANNEL = "channel"  # [kv_heads * head_dim]
    HEAD = "head"  # [kv_heads]
    TENSOR = "tensor"  # [1], MLA's latent
    TOKEN = "token"  # [blocks, kv_heads, block_size], dynamic


MODEL_DTYPES: Mapping[str, int] = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2})
"""Model dtypes that a cache may be stored in, and bytes of one element."""

ALIASES: Mapping[str, KVCacheQuantType] = MappingProxyType(
    {
        "fp8": KVCacheQuantType.FLOAT8_E4M3FN,
        "fp8_zp": KVCacheQuantType.FLOAT8_E4M3FN_ZP,
        "cache_int8": KVCacheQuantType.INT8,
        "cache_fp8": KVCacheQuantType.FLOAT8_E4M3FN,
        "cache_int4_zp": KVCacheQuantType.INT4_ZP,
    }
)
"""Names that FastDeploy's kernels and other engines use for the same types."""

CODE_DTYPE = "uint8"
"""Storage dtype of everything that is quantised, DSA's own format included."""

SCALE_DTYPE = "float32"
"""dtype of every scale and zero point, static or dynamic."""


@dataclass(frozen=True, slots=True)
class StorageDtype:
    """One row of the table of quantisation types.

    Attributes:
        quant_type: the type, or None for storage in the model's dtype.
        bits: bits of one stored element; None means the bits of the model's dtype.
        bound: largest magnitude a code stands for, before the scale; 0.0 when not quantised.
        code_min: smallest code value, before the scale (int8 is symmetric, the zero-point types use every code).
        is_float8: codes are e4m3 numbers; otherwise they are integers, kept as code + 2**(bits - 1).
        has_zero_point: value = (code - zero_point) * scale instead of code * scale.
        scales: where scales live.
        granularities: attention kind -> scale granularities that are legal with it. A kind that is missing here is
            an illegal combination.
    """

    quant_type: KVCacheQuantType | None
    bits: int | None
    scales: ScaleKind
    granularities: Mapping[AttentionKind, tuple[ScaleGranularity, ...]] = field(hash=False)
    bound: float = 0.0
    code_min: float = 0.0
    has_zero_point: bool = False
    is_float8: bool = False

    @property
    def name(self) -> str:
        """The type's name; "none" for storage in the model's dtype."""
        return self.quant_type.value if self.quant_type is not None else "none"

    @property
    def elements_per_byte(self) -> int:
        """How many codes one uint8 holds: 2 for 4-bit types, else 1."""
        return 8 // self.bits if self.bits is not None else 1

    def is_legal_with(self, attention: AttentionKind) -> bool:
        """Whether a cache of this type can serve the attention kind."""
        return attention in self.granularities


_C, _H = ScaleGranularity.CHANNEL, ScaleGranularity.HEAD
_STATIC = {AttentionKind.MHA: (_C, _H), AttentionKind.GQA: (_C, _H)}
_STATIC_AND_MLA = {**_STATIC, AttentionKind.MLA: (ScaleGranularity.TENSOR,)}
_TOKEN = {AttentionKind.MHA: (ScaleGranularity.TOKEN,), AttentionKind.GQA: (ScaleGranularity.TOKEN,)}
_UNSCALED: dict[AttentionKind, tuple[ScaleGranularity, ...]] = dict.fromkeys(AttentionKind, ())

_Q = KVCacheQuantType
STORAGE_DTYPES: Mapping[KVCacheQuantType | None, StorageDtype] = MappingProxyType(
    {
        row.quant_type: row
        for row in (
            StorageDtype(None, None, ScaleKind.NONE, _UNSCALED),
            StorageDtype(_Q.INT8, 8, ScaleKind.STATIC, _STATIC, 127.0, -127.0),
            StorageDtype(_Q.INT8_ZP, 8, ScaleKind.STATIC, _STATIC, 127.0, -128.0, True),
            StorageDtype(_Q.FLOAT8_E4M3FN, 8, ScaleKind.STATIC, _STATIC_AND_MLA, 448.0, -448.0, is_float8=True),
            StorageDtype(_Q.FLOAT8_E4M3FN_ZP, 8, ScaleKind.STATIC, _STATIC, 448.0, -448.0, True, is_float8=True),
            StorageDtype(_Q.BLOCK_WISE_FP8, 8, ScaleKind.DYNAMIC, _TOKEN, 448.0, -448.0, is_float8=True),
            StorageDtype(_Q.INT4_ZP, 4, ScaleKind.STATIC, _STATIC, 7.0, -8.0, True),
            StorageDtype(_Q.INT8_TOKEN, 8, ScaleKind.DYNAMIC, _TOKEN, 127.0, -127.0),
        )
    }
)


def parse_quant_type(value: str | KVCacheQuantType | None) -> KVCacheQuantType | None:
    """Turn a config's word (or None, or "none") into a quantisation type.

    Raises:
        ConfigError: the word is no type and no alias.
    """
    if value is None or isinstance(value, KVCacheQuantType):
        return value
    if value == "none":
        return None
    if isinstance(value, str):
        if value in ALIASES:
            return ALIASES[value]
        if value in KVCacheQuantType._value2member_map_:
            return KVCacheQuantType(value)
    raise ConfigError(
        f"unknown kv_cache_quant_type {value!r}; allowed: none, {', '.join(t.value for t in KVCacheQuantType)} "
        f"(aliases: {', '.join(ALIASES)})"
    )


def check_model_dtype(model_dtype: str) -> str:
    """Return model_dtype if a cache can be stored in it.

    Raises:
        ConfigError: it is none of MODEL_DTYPES.
    """
    if not isinstance(model_dtype, str) or model_dtype not in MODEL_DTYPES:
        raise ConfigError(f"unsupported model dtype {model_dtype!r}; allowed: {', '.join(MODEL_DTYPES)}")
    return model_dtype


def resolve_cache_dtype(kv_cache_quant_type: str | KVCacheQuantType | None, model_dtype: str) -> str:
    """The dtype that key and value caches are stored in.

    Args:
        kv_cache_quant_type: a quantisation type, its name or an alias; None or "none" for no quantisation.
        model_dtype: the logical dtype: "float32", "float16" or "bfloat16".

    Returns:
        model_dtype when nothing is quantised, else "uint8" (a packed type halves the last dimension, not the dtype).

    Raises:
        ConfigError: unknown type or unsupported model dtype.
    """
    check_model_dtype(model_dtype)
    return model_dtype if parse_quant_type(kv_cache_quant_type) is None else CODE_DTYPE


def packed_dim(storage: StorageDtype, dim: int, what: str) -> int:
    """Last dimension of a role in stored items: halved for 4-bit types.

    Raises:
        ConfigError: dim does not fill whole bytes.
    """
    if dim % storage.elements_per_byte:
        raise ConfigError(
            f"{what} {dim} is odd, but {storage.name} packs {storage.elements_per_byte} values into a byte; "
            f"use an even {what} or another kv_cache_quant_type"
        )
    return dim // storage.elements_per_byte


def check_legal(storage: StorageDtype, attention: AttentionKind) -> None:
    """Refuse a pair of quantisation type and attention kind that the table does not list.

    Raises:
        ConfigError: naming the pair and the types that are legal with this attention.
    """
    if not storage.is_legal_with(attention):
        legal = [row.name for row in STORAGE_DTYPES.values() if row.is_legal_with(attention)]
        raise ConfigError(
            f"kv_cache_quant_type {storage.name} is not supported with {attention.value} attention; "
            f"allowed with {attention.value}: {', '.join(legal)}"
        )


def itemsize(dtype: str) -> int:
    """Bytes of one item of a storage dtype (uint8, float32, float16, bfloat16)."""
    return 1 if dtype == CODE_DTYPE else MODEL_DTYPES[dtype]
