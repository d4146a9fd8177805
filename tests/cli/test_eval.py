"""fastkv eval as a person types it: calibrate a small model, compare its types, and every mistake a message."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.tiny_gguf import model_metadata, model_tensors, write_gguf

from fastkv.cli.main import main
from fastkv.core.dtype import STORAGE_DTYPES
from fastkv.engine.runtime_env import prepare_runtime

if "paddle" not in sys.modules:
    prepare_runtime()

TYPES = [row.name for row in STORAGE_DTYPES.values()]
MLA = {"attention": "mla", "num_kv_heads": 0, "head_dim": 0}
QUICK = ["--tokens", "60", "--continue", "4"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.gguf, which has a tokenizer of single bytes, its config, and its calibration."""
    from fastkv.engine.llama import random_geometry, random_weights

    folder = tmp_path_factory.mktemp("tiny")
    geometry = random_geometry(vocab_size=261)
    write_gguf(folder / "tiny.gguf", model_metadata(geometry), model_tensors(random_weights(geometry, 7), geometry))
    data = {
        "model": {
            "name": "tiny",
            "weights": "tiny.gguf",
            "dtype": "float32",
            "attention": "gqa",
            "num_layers": geometry.num_layers,
            "num_attention_heads": geometry.num_heads,
            "num_kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "max_context": 256,
        },
        "cache": {"block_size": 4, "num_device_blocks": 64, "scales_file": "scales.json"},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(data))
    assert main(["calibrate", str(path), "--tokens", "600"]) == 0
    return path


def changed(tiny: Path, name: str, **sections: dict[str, Any]) -> str:
    """The tiny config beside itself, with some keys changed."""
    data = yaml.safe_load(tiny.read_text())
    for section, keys in sections.items():
        data[section].update(keys)
    path = tiny.with_name(name)
    path.write_text(yaml.safe_dump(data))
    return str(path)


def rows_of(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", *args, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_eval_json_has_a_row_for_every_type_that_fits(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, str(tiny), *QUICK)
    assert [row["kv_cache_quant_type"] for row in rows] == TYPES
    for row in rows:
        assert row["storage_dtype"] == ("float32" if row["kv_cache_quant_type"] == "none" else "uint8")
        assert row["perplexity"] > 1
        assert row["tokens"] == 59
        assert 0 <= row["greedy_agreement"] <= 1
        assert 0 <= row["common_prefix_tokens"] <= row["continuation_tokens"] == 4
    assert rows[0]["greedy_agreement"] == 1
    assert {row["kv_cache_quant_type"]: row["bytes_per_token"] for row in rows}["int4_zp"] == rows[0][
        "bytes_per_token"
    ] / 8


def test_eval_v0_equals_v1(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v0, v1 = (rows_of(capsys, str(tiny), *QUICK, "--cache-manager", manager) for manager in ("v0", "v1"))
    assert v0 == v1


def test_eval_types_are_chosen_by_name_or_alias_beside_none(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, str(tiny), *QUICK, "--types", "fp8, int8")
    assert [row["kv_cache_quant_type"] for row in rows] == ["none", "float8_e4m3fn", "int8"]


def test_eval_reads_the_users_text(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox" * 3)
    rows = rows_of(capsys, str(tiny), "--text", str(text), "--types", "none", "--continue", "2")
    assert rows[0]["tokens"] == len("a quick brown fox" * 3) - 1  # "the" is one token of the tiny vocabulary


def test_eval_table_fits_a_narrow_terminal(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["eval", str(tiny), *QUICK]) == 0
    out = capsys.readouterr().out
    assert set(TYPES) <= set(out.split())
    assert "perplexity" in out
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--types", "int3"], "unknown kv_cache_quant_type 'int3'"),
        (["--types", ""], "unknown kv_cache_quant_type ''"),
        (["--kv-cache-quant-type", "int8"], "name them with --types"),
        (["--tokens", "1"], "--tokens 1 must be at least 2"),
        (["--context", "0"], "--context 0 must be at least 2"),
        (["--continue", "0"], "--continue 0 must be at least 1"),
        (["--text", "missing.txt"], "text file missing.txt cannot be read"),
        (["--tokens", "400", "--context", "300"], "model.max_context is 256"),
        (["--cache-manager", "v2"], "'v2' is not allowed"),
    ],
)
def test_eval_mistake_is_a_message(
    tiny: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main(["eval", str(tiny), *args]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("sections", "args", "message"),
    [
        ({"model": {"weights": "random:3"}}, [], "random:3 has no tokenizer"),
        ({"model": {"weights": None}}, [], "has no weights in its config"),
        ({"cache": {"scales_file": None}}, ["--types", "int8"], "needs static scales"),
        ({"cache": {"scales_file": "missing.json"}}, ["--types", "int8"], "missing.json does not exist"),
        ({"model": {"head_dim": 7}}, ["--types", "int4_zp"], "head_dim 7 is odd"),
        (
            {"model": {**MLA, "kv_lora_rank": 16, "qk_rope_head_dim": 8}},
            ["--types", "int8"],
            "int8 is not supported with mla",
        ),
    ],
)
def test_eval_config_that_cannot_be_evaluated_is_a_message(
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    sections: dict[str, dict[str, Any]],
    args: list[str],
    message: str,
) -> None:
    assert main(["eval", changed(tiny, "changed.yaml", **sections), *QUICK, *args]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_eval_without_scales_still_compares_what_needs_none(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = changed(tiny, "no_scales.yaml", cache={"scales_file": None})
    rows = rows_of(capsys, config, *QUICK, "--types", "block_wise_fp8")
    assert [row["kv_cache_quant_type"] for row in rows] == ["none", "block_wise_fp8"]


def test_eval_interrupted_while_it_reads_the_text_ends_at_once(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals were held until the model was loaded, which takes minutes for a large one."""
    went_on: list[bool] = []

    def interrupted(*args: object) -> str:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        return "text"

    monkeypatch.setattr("fastkv.engine.corpus.load_text", interrupted)
    assert main(["eval", str(tiny), *QUICK]) == 130
    assert not went_on
