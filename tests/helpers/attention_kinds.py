"""A tiny random model's configuration for each attention kind, with static scales calibrated on that very model."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fastkv.config import Config, parse_config
from fastkv.core.scales import CalibrationRanges

VOCAB_SIZE = 97
_rng = np.random.default_rng(11)
PROMPTS = [_rng.integers(0, VOCAB_SIZE, size).tolist() for size in (1, 4, 9, 30)]

_GEOMETRY: dict[str, dict[str, Any]] = {
    "mha": {"num_attention_heads": 4, "num_kv_heads": 4, "head_dim": 8},
    "gqa": {"num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "mla": {"num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
    "dsa": {"num_attention_heads": 4, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "index_head_dim": 128},
}
_CACHE: dict[str, Any] = {"manager": "v1", "block_size": 4, "num_device_blocks": 60}


def kind_data(attention: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The config of a kind's tiny model as nested dicts, with some keys of some sections changed."""
    data: dict[str, Any] = {
        "model": {
            "name": f"tiny-{attention}",
            "weights": "random:3",
            "dtype": "float32",
            "attention": attention,
            "num_layers": 2,
            "max_context": 256,
            **_GEOMETRY[attention],
        },
        "cache": {**_CACHE, "scales_file": "scales.json"},
    }
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return data


def kind_config(attention: str, **sections: dict[str, Any]) -> Config:
    """The same, validated. Its folder holds the scales, except for DSA, which has none."""
    return parse_config(kind_data(attention, **sections), "." if attention == "dsa" else _scales_folder(attention))


@functools.cache
def _scales_folder(attention: str) -> str:
    """A folder with scales.json, measured once a session (an MTP layer borrows layer 0's)."""
    from fastkv.engine.calibration import RangeCollector, collect_ranges
    from fastkv.engine.model import load_model
    from fastkv.worker.static_scales import write_scales_file

    model, collector = load_model(parse_config(kind_data(attention))), RangeCollector()
    text = np.random.default_rng(6).integers(0, VOCAB_SIZE, 300).tolist()
    num_tokens = collect_ranges(model, text, collector, chunk_tokens=100)
    layers = collector.ranges()
    layers[2] = layers[0]
    folder = tempfile.mkdtemp(prefix="fastkv-test-scales-")
    ranges = CalibrationRanges(f"tiny-{attention}", model.revision, collector.method, num_tokens, layers)
    write_scales_file(Path(folder, "scales.json"), ranges)
    return folder
