"""A tiny random model's configuration, with static scales calibrated on itself, and prompts for it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fastkv.config import Config, parse_config
from fastkv.core.scales import CalibrationRanges

TINY = {"vocab_size": 97, "num_layers": 2}
_rng = np.random.default_rng(5)
PROMPTS = [_rng.integers(0, TINY["vocab_size"], size).tolist() for size in (1, 3, 4, 5, 8, 17, 33, 60)]

_MODEL: dict[str, Any] = {
    "name": "tiny",
    "weights": "random:3",
    "dtype": "float32",
    "attention": "gqa",
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_context": 512,
}
_CACHE: dict[str, Any] = {"manager": "v1", "block_size": 8, "num_device_blocks": 90, "scales_file": "scales.json"}


def tiny_config(**sections: dict[str, Any]) -> Config:
    """The tiny model's config with some keys of some sections changed."""
    data: dict[str, Any] = {"model": _MODEL, "cache": _CACHE}
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return parse_config(data, base_dir=_scales_folder())


@functools.cache
def _scales_folder() -> str:
    """A folder with scales.json, measured on the tiny model once a session (an MTP layer borrows layer 0's)."""
    from fastkv.engine.calibration import RangeCollector, collect_ranges
    from fastkv.engine.model import load_model
    from fastkv.worker.static_scales import write_scales_file

    model = load_model(parse_config({"model": _MODEL, "cache": _CACHE}))
    collector = RangeCollector()
    text = np.random.default_rng(6).integers(0, TINY["vocab_size"], 300).tolist()
    num_tokens = collect_ranges(model, text, collector, chunk_tokens=100)
    layers = collector.ranges()
    layers[2] = layers[0]
    folder = tempfile.mkdtemp(prefix="fastkv-test-scales-")
    ranges = CalibrationRanges("tiny", model.revision, collector.method, num_tokens, layers)
    write_scales_file(Path(folder, "scales.json"), ranges)
    return folder
