"""Static scales on the worker side: the scales file, and what one rank loads from it.

The file is JSON: value ranges of the whole model (see core/scales.py), so the same file serves every quantisation type,
granularity and tensor-parallel size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastkv.config import Config
from fastkv.core.dtype import ScaleKind
from fastkv.core.scales import CalibrationRanges, RoleScales, ValueRange, derive_scales
from fastkv.core.spec import Role
from fastkv.errors import ConfigError

FORMAT = "fastkv.kv_cache_scale"
VERSION = 1
_SIGNIFICANT_DIGITS = 5

LayerScales = Mapping[int, Mapping[Role, RoleScales]]
"""global layer id -> role -> scales of one rank."""


def write_scales_file(path: str | os.PathLike[str], ranges: CalibrationRanges) -> None:
    """Write a calibration as kv_cache_scale.json; the file appears whole or not at all. Raises ConfigError."""
    layers = [
        {"layer": layer, **{role.value: _range_to_json(entry) for role, entry in roles.items()}}
        for layer, roles in sorted(ranges.layers.items())
    ]
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": ranges.model,
        "weights_fingerprint": ranges.weights_fingerprint,
        "method": ranges.method,
        "num_tokens": ranges.num_tokens,
    }
    lines = ",\n".join(json.dumps(layer, separators=(",", ":")) for layer in layers)
    text = json.dumps(head, indent=1)[:-2] + ',\n "layers": [\n' + lines + "\n]}\n"
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"scales file {path} cannot be written: {error}") from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse, before any work is done, a scales file that could not be written. Raises ConfigError."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the scales file in it")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the folder {path.parent} of the scales file does not exist or cannot be written to")


def read_scales_file(path: str | os.PathLike[str]) -> CalibrationRanges:
    """Read a calibration.

    Raises:
        ConfigError: missing, broken or foreign file.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"scales file {path} does not exist; run `fastkv calibrate` to make it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"scales file {path} cannot be read: {error}; run `fastkv calibrate` again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise ConfigError(
            f"{path} is no scales file of this version ({FORMAT} {VERSION}); run `fastkv calibrate` to make one"
        )
    try:
        layers = {
            int(entry["layer"]): {Role(key): _range_from_json(entry[key]) for key in entry if key != "layer"}
            for entry in data["layers"]
        }
        return CalibrationRanges(
            model=str(data["model"]),
            weights_fingerprint=str(data["weights_fingerprint"]),
            method=str(data["method"]),
            num_tokens=int(data["num_tokens"]),
            layers=layers,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"scales file {path} is damaged ({error!r}); run `fastkv calibrate` again") from error


def named_arrays(scales: LayerScales | None, prefix: str = "") -> dict[str, npt.NDArray[np.float32]]:
    """Scales and zero points by "{prefix}{layer}.{role}.scale" and "...zero_point", to digest them."""
    arrays = {}
    for layer, roles in (scales or {}).items():
        for role, of_role in roles.items():
            arrays[f"{prefix}{layer}.{role.value}.scale"] = of_role.scale
            if of_role.zero_point is not None:
                arrays[f"{prefix}{layer}.{role.value}.zero_point"] = of_role.zero_point
    return arrays


def load_static_scales(config: Config, rank: int, weights_fingerprint: str = "") -> LayerScales | None:
    """Scales of one rank as the config names them; None when its quantisation type has no static scales.

    Args:
        config: names scales file, model and quantisation type.
        rank: tensor-parallel rank.
        weights_fingerprint: of the weights that run; "" when the caller does not know it.

    Raises:
        ConfigError: the type needs scales and the file is missing, foreign, wrong-shaped or holds a zero scale.
    """
    spec = config.cache_spec()
    if spec.storage.scales is not ScaleKind.STATIC:
        return None
    if config.cache.scales_file is None:
        raise ConfigError(
            f"kv_cache_quant_type {spec.storage.name} needs static scales, but cache.scales_file is not set; "
            "run `fastkv calibrate` and name its file there"
        )
    ranges = read_scales_file(config.resolve_path(config.cache.scales_file))
    if weights_fingerprint and weights_fingerprint != ranges.weights_fingerprint:
        raise ConfigError(
            f"the scales file was calibrated on weights {ranges.weights_fingerprint or '(unknown)'}, this model's are "
            f"{weights_fingerprint}; run `fastkv calibrate` again"
        )
    return derive_scales(ranges, spec, rank, config.model.name)


def _range_to_json(entry: ValueRange) -> dict[str, list[list[float]]]:
    def rounded(array: np.ndarray) -> list[list[float]]:
        return [[float(f"{x:.{_SIGNIFICANT_DIGITS}g}") for x in row] for row in array.tolist()]

    return {"min": rounded(entry.minimum), "max": rounded(entry.maximum)}


def _range_from_json(entry: Any) -> ValueRange:
    low, high = (np.asarray(entry[name], dtype=np.float32) for name in ("min", "max"))
    if low.ndim != 2 or high.ndim != 2:
        raise ValueError("a range must be a list of one list a head")
    return ValueRange(low, high)
