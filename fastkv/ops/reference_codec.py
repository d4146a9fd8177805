"""What stored codes mean, in NumPy: the model's dtypes and every quantisation type.

Called by reference.py and by tests; imports without paddle. Written to be read, and on purpose unlike the kernels:
float8 is a table of 256 values and a search for the nearest one, where custom_ops/include/fastkv/codec.h works on bits.
Codes are the same, bit for bit; so each float32 operation here is one rounding there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastkv.core.dtype import STORAGE_DTYPES, StorageDtype, parse_quant_type

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

FLOAT32_MAX = np.finfo(np.float32).max
FLOAT32_TINY = np.finfo(np.float32).tiny
E4M3_NAN = 0x7F


# --- the model's dtypes: bfloat16, which NumPy lacks, is uint16 bits ---------------------------------------------


def bfloat16_to_float32(bits: Array) -> Float32:
    """uint16 bits of bfloat16 -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(x: Float32) -> Array:
    """float32 -> uint16 bits of bfloat16, half to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def to_float32(x: Array, model_dtype: str) -> Float32:
    """An array in a model dtype (bfloat16: uint16 bits) -> float32."""
    return bfloat16_to_float32(x) if model_dtype == "bfloat16" else x.astype(np.float32)


def from_float32(x: Array, model_dtype: str) -> Array:
    """float32 -> an array in a model dtype (bfloat16: uint16 bits)."""
    x = np.asarray(x, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return float32_to_bfloat16(x) if model_dtype == "bfloat16" else x.astype(model_dtype)


# --- float8 e4m3fn --------------------------------------------------------------------------------------------------


def _e4m3_values() -> Float32:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    values = np.where(codes >= 128, -magnitude, magnitude)
    values[(codes & 0x7F) == E4M3_NAN] = np.nan  # there is no infinity
    return values.astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""Value of each of the 256 codes; 0x7F and 0xFF are NaN."""


def decode_e4m3(codes: Array) -> Float32:
    """uint8 codes -> float32 values."""
    return E4M3_VALUES[codes]


def encode_e4m3(x: Float32) -> Array:
    """float32 -> uint8 codes: the nearest value, ties to the even code; saturates at +-448; every NaN becomes 0x7F."""
    ladder = E4M3_VALUES[:E4M3_NAN].astype(np.float64)  # codes 0 to 126 ascend from 0 to 448
    magnitude = np.abs(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=448.0, neginf=-448.0))
    above = np.minimum(np.searchsorted(ladder, magnitude), E4M3_NAN - 1)
    below = np.maximum(above - 1, 0)
    to_above, to_below = np.abs(ladder[above] - magnitude), np.abs(magnitude - ladder[below])
    is_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(is_above, above, below) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), E4M3_NAN, codes).astype(np.uint8)


# --- quantisation types -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowScales:
    """What rows are (de)quantised with, broadcast against rows [..., dim]; None where the type has none."""

    scale: Float32 | None = None
    zero_point: Float32 | None = None


def storage_of(quant_type: str) -> StorageDtype:
    """The table's row for a type's name."""
    return STORAGE_DTYPES[parse_quant_type(quant_type)]


def dynamic_scale(quant_type: str, rows: Float32) -> Float32:
    """One scale a row, from its largest magnitude, NaN ignored. [..., dim] -> [...]."""
    magnitude = np.where(np.isnan(rows), np.float32(0), np.abs(rows)).max(axis=-1)
    bound = np.float32(storage_of(quant_type).bound)
    return np.maximum(np.minimum(magnitude, FLOAT32_MAX) / bound, FLOAT32_TINY).astype(np.float32)


def encode(quant_type: str, rows: Float32, scales: RowScales) -> Array:
    """float32 rows [..., dim] -> uint8 codes [..., dim], int4: [..., dim / 2]. scale holds the dynamic scale, too."""
    storage, scale, zero_point = storage_of(quant_type), scales.scale, scales.zero_point
    assert scale is not None
    offset = np.float32(0) if zero_point is None else zero_point
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if storage.is_float8:
            if zero_point is not None:
                return encode_e4m3(rows / scale + zero_point)
            return encode_e4m3(rows * (np.float32(1) / scale))
        scaled = rows * (np.float32(1) / scale) + offset
    scaled = np.where(np.isnan(scaled), offset, scaled)  # integers have no NaN: it counts as 0.0
    codes = np.clip(np.rint(scaled), storage.code_min, storage.bound).astype(np.int32)
    assert storage.bits is not None
    codes = (codes + 2 ** (storage.bits - 1)).astype(np.uint8)
    if storage.elements_per_byte == 1:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << 4)  # low nibble = even index


def decode(quant_type: str, codes: Array, scales: RowScales) -> Float32:
    """uint8 codes [..., dim], int4: [..., dim / 2] -> float32 rows [..., dim]."""
    storage, scale, zero_point = storage_of(quant_type), scales.scale, scales.zero_point
    assert scale is not None
    if storage.is_float8:
        values = decode_e4m3(codes)
    else:
        assert storage.bits is not None
        if storage.elements_per_byte == 2:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        values = codes.astype(np.float32) - np.float32(2 ** (storage.bits - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        return ((values if zero_point is None else values - zero_point) * scale).astype(np.float32)
