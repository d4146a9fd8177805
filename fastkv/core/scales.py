"""Static scales: from calibrated value ranges to the numbers that a quantisation type needs.

A calibration keeps, for every layer and channel, the smallest and largest value that real text produced. Every static
type's scales follow from those ranges, so one file serves all of them:

    without zero point   scale = max(|min|, |max|) / bound                      value = code * scale
    with zero point      scale = (max - min) / (bound - code_min)               value = (code - zero_point) * scale
                         zero_point = code_min - min / scale

Ranges are of the whole model; `derive` keeps the heads of one rank. Reading and writing files is not done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastkv.core.dtype import AttentionKind, ScaleGranularity, ScaleKind, StorageDtype
from fastkv.core.spec import CacheSpec, LayerGroup, Role
from fastkv.errors import ConfigError

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Smallest and largest value of each channel of one role: float32 [kv_heads, dim], of the whole model."""

    minimum: FloatArray
    maximum: FloatArray


@dataclass(frozen=True, slots=True)
class RoleScales:
    """What one role of one layer of one rank is quantised with: float32, per channel [kv_heads * dim], per head
    [kv_heads] or per tensor [1]."""

    scale: FloatArray
    zero_point: FloatArray | None


@dataclass(frozen=True)
class CalibrationRanges:
    """A whole calibration.

    Attributes:
        model: name of the model, as in the config.
        weights_fingerprint: of the weights that were run; "" when unknown.
        method: how ranges were taken, for people ("max", "percentile 99.9").
        num_tokens: tokens of text that were run.
        layers: global layer id -> role -> range. Roles are key and value, or latent under MLA.
    """

    model: str
    weights_fingerprint: str
    method: str
    num_tokens: int
    layers: Mapping[int, Mapping[Role, ValueRange]]


def scaled_roles(group: LayerGroup) -> tuple[Role, ...]:
    """Roles of a group that static scales exist for."""
    return (Role.LATENT,) if group.geometry.kind is AttentionKind.MLA else (Role.KEY, Role.VALUE)


def derive_scales(
    ranges: CalibrationRanges, spec: CacheSpec, rank: int, model: str
) -> dict[int, dict[Role, RoleScales]]:
    """Scales and zero points of one rank, for every layer of every group.

    Args:
        ranges: a calibration of the whole model.
        spec: decides type, granularity and heads.
        rank: tensor-parallel rank, in [0, spec.tp_size).
        model: the config's model name; a calibration of another model is refused.

    Returns:
        global layer id -> role -> RoleScales.

    Raises:
        ConfigError: foreign model, missing layers or roles, wrong shapes, not finite, or a scale of zero.
    """
    if spec.storage.scales is not ScaleKind.STATIC:
        raise ConfigError(f"{spec.storage.name} has no static scales; remove cache.scales_file")
    if not 0 <= rank < spec.tp_size:
        raise ConfigError(f"rank {rank} is not in [0, {spec.tp_size})")
    if ranges.model != model:
        raise ConfigError(
            f"the scales were calibrated for model {ranges.model!r}, this config runs {model!r}; "
            "run `fastkv calibrate` for this model"
        )
    return {
        layer: {role: _derive_role(ranges, spec, group, layer, role, rank) for role in scaled_roles(group)}
        for group in spec.groups
        for layer in group.layers
    }


def rank_heads(num_kv_heads: int, tp_size: int, rank: int) -> slice:
    """Which of the model's KV heads a rank keeps: its share, or the one that it replicates."""
    if num_kv_heads >= tp_size:
        share = num_kv_heads // tp_size
        return slice(rank * share, (rank + 1) * share)
    head = rank // (tp_size // num_kv_heads)
    return slice(head, head + 1)


def _derive_role(
    ranges: CalibrationRanges, spec: CacheSpec, group: LayerGroup, layer: int, role: Role, rank: int
) -> RoleScales:
    where = f"static scales of layer {layer} ({group.name}), {role.value}"
    try:
        entry = ranges.layers[layer][role]
    except KeyError:
        raise ConfigError(f"{where}: missing from the scales file; run `fastkv calibrate` again") from None
    geometry = group.geometry
    if role is Role.LATENT:
        heads, expected = slice(0, 1), (1, geometry.latent_dim)
    else:
        dim = geometry.head_dim if role is Role.KEY else geometry.value_dim
        heads, expected = rank_heads(geometry.num_kv_heads, spec.tp_size, rank), (geometry.num_kv_heads, dim)
    low, high = _checked(where, entry, expected)
    axes: Mapping[ScaleGranularity | None, tuple[int, ...]] = {
        ScaleGranularity.CHANNEL: (),
        ScaleGranularity.HEAD: (1,),
        ScaleGranularity.TENSOR: (0, 1),
    }
    axis = axes[spec.scale_granularity]
    low, high = low[heads].min(axis=axis).reshape(-1), high[heads].max(axis=axis).reshape(-1)
    return _from_range(where, spec.storage, low, high)


def _checked(where: str, entry: ValueRange, expected: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    for name, array in (("minimum", entry.minimum), ("maximum", entry.maximum)):
        if array.shape != expected:
            raise ConfigError(
                f"{where}: {name} has shape {list(array.shape)}, this model needs [kv_heads, dim] = {list(expected)}"
            )
        if not np.isfinite(array).all():
            raise ConfigError(f"{where}: {name} holds NaN or infinity; run `fastkv calibrate` again")
    if (entry.minimum > entry.maximum).any():
        raise ConfigError(f"{where}: a minimum lies above its maximum; run `fastkv calibrate` again")
    return entry.minimum, entry.maximum


def _from_range(where: str, storage: StorageDtype, low: FloatArray, high: FloatArray) -> RoleScales:
    if storage.has_zero_point:
        scale = (high - low) / np.float32(storage.bound - storage.code_min)
    else:
        scale = np.maximum(np.abs(low), np.abs(high)) / np.float32(storage.bound)
    scale = scale.astype(np.float32)
    if not (scale > 0).all():
        raise ConfigError(
            f"{where}: scale {_first(np.flatnonzero(~(scale > 0)))} is zero, so nothing could be stored with it; "
            "calibrate with more text"
        )
    if not storage.has_zero_point:
        return RoleScales(scale, None)
    return RoleScales(scale, (np.float32(storage.code_min) - low / scale).astype(np.float32))


def _first(indices: Iterable[int]) -> int:
    return int(next(iter(indices)))
