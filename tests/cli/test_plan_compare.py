"""fastkv plan --compare: every type that a model can be stored with, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.toy import toy_data

from fastkv.cli.main import main
from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind

CONFIGS = Path(__file__).parents[2] / "configs"


def write(tmp_path: Path, data: dict[str, Any]) -> str:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def compare(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert main(["plan", *args, "--compare", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_plan_compare_row_is_the_plan_of_that_type(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / f"{name}.yaml")
    rows = compare(capsys, config)
    for row in rows:
        assert main(["plan", config, "--kv-cache-quant-type", row["kv_cache_quant_type"], "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert row == {key: plan[key] for key in row}
        assert row["storage_dtype"] == plan["groups"][0]["roles"][0]["dtype"]
        assert row["num_device_blocks"] > 0


@pytest.mark.parametrize("attention", [kind.value for kind in AttentionKind])
def test_plan_compare_lists_exactly_the_legal_types(
    tmp_path: Path, attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = compare(capsys, write(tmp_path, toy_data(attention)))
    legal = [row.name for row in STORAGE_DTYPES.values() if row.is_legal_with(AttentionKind(attention))]
    assert [row["kv_cache_quant_type"] for row in rows] == legal
    none = "uint8" if attention == "dsa" else "bfloat16"
    assert [row["storage_dtype"] for row in rows] == [none] + ["uint8"] * (len(rows) - 1)


def test_plan_compare_type_that_does_not_fit_the_heads_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = toy_data()
    data["model"]["head_dim"] = 7
    types = [row["kv_cache_quant_type"] for row in compare(capsys, write(tmp_path, data))]
    assert "int4_zp" not in types
    assert types == [row.name for row in STORAGE_DTYPES.values() if row.elements_per_byte == 1]


def test_plan_compare_granularity_of_the_config_hides_no_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config for int8 per head is compared with types that have no static scales at all."""
    data = toy_data(quant_type="int8", scale_granularity="head")
    assert len(compare(capsys, write(tmp_path, data))) == len(STORAGE_DTYPES)


def test_plan_compare_type_over_the_budget_has_no_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block costs 768 bytes in bfloat16 and 384 in int8: 767 bytes hold one of the second."""
    config = write(tmp_path, toy_data(quant_type="int8", num_host_blocks=0))
    rows = {row["kv_cache_quant_type"]: row for row in compare(capsys, config, "--device-memory", "767")}
    assert (rows["none"]["num_device_blocks"], rows["none"]["device_tokens"]) == (0, 0)
    assert (rows["int8"]["num_device_blocks"], rows["int8"]["device_tokens"]) == (1, 4)
    assert rows["int4_zp"]["num_device_blocks"] == 767 // 192


def test_plan_compare_fraction_of_an_unknown_device_is_an_error_and_no_row_of_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, toy_data(num_host_blocks=0))
    assert main(["plan", config, "--compare", "--device-memory", "0.5"]) == 1
    assert "set device.memory" in capsys.readouterr().err


def test_plan_compare_table_shows_whole_names_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(CONFIGS / "llama-3.1-70b-tp8.yaml"), "--compare"]) == 0
    words = capsys.readouterr().out.split()
    assert {row.name for row in STORAGE_DTYPES.values()} <= set(words)
    assert "1,258,240" in words


def test_plan_compare_with_a_single_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(tmp_path, toy_data()), "--compare", "--kv-cache-quant-type", "int8"]) == 1
    assert "leave --kv-cache-quant-type out" in capsys.readouterr().err


def test_plan_dsa_reports_the_dtype_that_memory_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DSA stores bytes of a format of its own whatever the model's dtype is."""
    assert main(["plan", write(tmp_path, toy_data("dsa")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["storage_dtype"] == "uint8"
