"""fastkv calibrate: the file it writes, percentiles, and every mistake before any work is done."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastkv.cli.main import main
from fastkv.core.spec import Role
from fastkv.engine.calibration import RangeCollector
from fastkv.errors import ConfigError
from fastkv.worker.static_scales import read_scales_file

SMOLLM2 = str(Path(__file__).parents[2] / "configs" / "smollm2.yaml")


def test_calibrate_writes_a_file_that_generate_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "scales.json"
    text.write_text("A cache keeps what was computed, so that it need not be computed again. " * 4)
    options = ["--text", str(text), "--tokens", "40", "--output", str(output), "--json"]
    assert main(["calibrate", SMOLLM2, *options]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(output), "method": "max", "tokens": 40, "layers": 30}
    ranges = read_scales_file(output)
    assert ranges.model == "smollm2-135m-instruct"
    assert ranges.layers[29][Role.VALUE].maximum.shape == (3, 64)
    small = ["--device-memory", "32MiB", "--max-tokens", "1", "--kv-cache-quant-type", "int8", "--json"]
    assert main(["generate", SMOLLM2, "--prompt", "A cache", "--set", f"cache.scales_file={output}", *small]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["storage_dtype"] == "uint8"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tokens", "1"], "at least 2 tokens"),
        (["--percentile", "40"], "must lie in (50, 100]"),
        (["--percentile", "101"], "must lie in (50, 100]"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--output", "/no/such/folder/scales.json"], "does not exist or cannot be written to"),
        (["--output", "/tmp"], "/tmp is a folder"),
        (["--set", "cache.scales_file=null"], "nowhere to write"),
        (["--set", "cache.scales_file"], "write SECTION.KEY=VALUE"),
        (["--set", "model.weights=missing.gguf"], "missing.gguf"),
    ],
)
def test_calibrate_mistake_is_a_message(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(["calibrate", SMOLLM2, *args]) == 1
    assert message in capsys.readouterr().err


def test_ranges_of_several_chunks_are_those_of_all_values() -> None:
    values = np.random.default_rng(3).standard_normal((300, 2, 5)).astype(np.float32)
    extremes, tails = RangeCollector(), RangeCollector(98.0)
    for chunk in np.array_split(values, 4):
        extremes.add(7, Role.KEY, chunk)
        tails.add(7, Role.KEY, chunk)
    found = extremes.ranges()[7][Role.KEY]
    np.testing.assert_array_equal(found.minimum, values.min(axis=0))
    np.testing.assert_array_equal(found.maximum, values.max(axis=0))
    cut = tails.ranges()[7][Role.KEY]
    inside = (values >= cut.minimum) & (values <= cut.maximum)
    assert 0.975 <= inside.mean() <= 0.985
    assert (cut.maximum < found.maximum).all()


def test_percentile_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="percentile 50"):
        RangeCollector(50.0)
