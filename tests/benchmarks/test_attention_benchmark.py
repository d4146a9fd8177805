"""benchmarks/attention.py and end_to_end.py: the rows that are documented, with their bounds, at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import attention
import attention_cases
import end_to_end
import pytest
from common import Row

from fastkv.core.dtype import STORAGE_DTYPES

TOY = """
model:
  name: toy
  weights: random:1
  dtype: float32
  attention: gqa
  num_layers: 2
  num_attention_heads: 4
  num_kv_heads: 2
  head_dim: 8
  max_context: 512
cache:
  manager: v1
  block_size: 16
  num_device_blocks: 32
device:
  type: cpu
"""


@pytest.fixture
def floor(monkeypatch: pytest.MonkeyPatch) -> attention.AttentionFloor:
    """The machine's rates; sizes so small that a row takes milliseconds."""
    monkeypatch.setattr(attention, "CONTEXTS", {"4k": 70, "16k": 100, "64k": 130})
    monkeypatch.setattr(attention, "PROMPTS", {"512": 20, "2k": 70, "8k": 80})
    monkeypatch.setattr(attention, "MOVED_TOKENS", 128)
    monkeypatch.setattr(attention, "MOVED_BLOCKS", 3)
    monkeypatch.setattr(attention_cases, "COLD_BYTES", 1)
    return attention.AttentionFloor()


def check_row(row: Row) -> None:
    assert row.value > 0
    assert row.bound > 0
    assert row.ratio == pytest.approx(row.value / row.bound)


def test_grid_covers_every_storage_type_and_size() -> None:
    names = {case.name for case in attention.cases(quick=False)}
    assert set(attention.TYPES) - set(attention_cases.MODEL_DTYPES) == {
        row.name for row in STORAGE_DTYPES.values() if row.quant_type is not None
    }
    for name in attention.TYPES:
        assert {f"decode_{name}_{size}_b{batch}" for size in ("4k", "16k", "64k") for batch in (1, 8)} <= names
        assert {f"prefill_{name}_512", f"prefill_{name}_2k"} <= names
    assert {"mla_decode_bf16_64k", "mla_decode_float8_e4m3fn_4k", "prefill_bf16_8k"} <= names


def test_attention_rows_are_named_as_documented_and_have_bounds(floor: attention.AttentionFloor) -> None:
    wanted = {"decode_f32_4k_b1", "decode_int4_zp_64k_b8", "mla_decode_float8_e4m3fn_16k", "prefill_bf16_512"}
    found = [case for case in attention.cases(quick=False) if case.name in wanted]
    assert len(found) == len(wanted)
    for case in found:
        first, *peers = attention.measure_attention(case, floor, 0.0)
        assert first.name == case.name
        assert {row.name for row in peers} <= {f"{peer}_{case.name}" for peer in ("paddle", "torch")}
        for row in (first, *peers):
            check_row(row)


def test_moves_and_speedups_are_named_as_documented(floor: attention.AttentionFloor) -> None:
    for name in ("bf16", "int8_token"):
        rows = attention.measure_moves(name, floor, 0.0)
        assert [row.name for row in rows] == [f"write_{name}", f"gather_{name}", f"copy_blocks_{name}"]
        for row in rows:
            check_row(row)
    row = attention.measure_speedup("int4_zp", 0.0, 2)
    assert (row.name, row.bound) == ("speedup_int4_zp", 1.0)


def test_only_measures_nothing_else(floor: attention.AttentionFloor, capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["--quick", "--json", "--only", "copy_blocks_int8"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["copy_blocks_int8"]


def test_notes_name_missed_targets_and_compare_with_peers() -> None:
    rows = [
        Row.rate("decode_int8_4k_b1", 5.0, "GB/s", 10.0),
        Row.rate("decode_int8_token_4k_b1", 5.0, "GB/s", 10.0),
        Row.rate("prefill_f32_2k", 7.0, "GFLOP/s", 10.0),
        Row.rate("decode_f32_4k_b1", 9.0, "GB/s", 10.0),
        Row.rate("torch_decode_f32_4k_b1", 6.0, "GB/s", 10.0),
    ]
    assert attention.judge(rows) == [
        "below its target of 0.6: decode_int8_4k_b1 0.50",
        "decode_f32_4k_b1: 1.5x as fast as torch",
    ]


def test_end_to_end_rows_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(TOY)
    monkeypatch.setattr(end_to_end, "QUICK_CONTEXTS", (48, 256, 1024))
    assert end_to_end.main(["--quick", "--json", "--config", str(config), "--type", "int8_token"]) == 0
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    parts = ("step", "model", "attention", "management", "share")
    assert list(rows) == [f"{part}_{size}" for size in (48, 256) for part in parts]  # 1024 tokens do not fit this model
    for size in (48, 256):
        step, model, attending, managing, share = (rows[f"{part}_{size}"] for part in parts)
        assert min(model, attending, managing) > 0
        assert model + attending + managing == pytest.approx(step, rel=0.5)  # medians of each
        assert share == pytest.approx((attending + managing) / step * 100)
