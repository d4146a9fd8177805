"""Rows, interleaving and output that all benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from common import Row, interleave, load_floor, print_rows


def test_row_ratio_is_one_at_the_bound_and_higher_is_better() -> None:
    assert Row.cost("a", 20.0, "ns", 10.0).ratio == 0.5
    assert Row.rate("a", 20.0, "GB/s", 40.0).ratio == 0.5
    assert Row.cost("a", 5.0, "ns", 10.0).ratio == 2.0


def test_interleave_takes_turns_and_medians_without_the_warmup() -> None:
    calls: list[str] = []

    def first() -> list[float]:
        calls.append("a")
        return [1000.0 if calls.count("a") == 1 else float(calls.count("a")), 7.0]

    def second() -> list[float]:
        calls.append("b")
        return [5.0]

    medians = interleave([first, second], budget_s=0, min_samples=3)
    assert medians == [[3.0, 7.0], [5.0]]
    assert "".join(calls) == "ababbaab"


def test_print_rows_json_is_a_list_of_the_agreed_keys(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([Row.cost("life_8k_64_1e5", 40.0, "ns/block", 20.0)], as_json=True, notes=["a note"])
    shown = capsys.readouterr()
    (row,) = json.loads(shown.out)
    assert row == {"name": "life_8k_64_1e5", "value": 40.0, "unit": "ns/block", "bound": 20.0, "ratio": 0.5}
    assert shown.err == "a note\n"


def test_print_rows_table_shows_figure_bound_and_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([Row.cost("life_8k_64_1e5", 1234.5, "ns/block", 20.0)], as_json=False, notes=["a note"])
    header, row, note = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "value", "bound", "unit", "ratio"]
    assert row.split() == ["life_8k_64_1e5", "1,234", "20", "ns/block", "0.02"]
    assert note == "a note"


def test_floor_that_does_not_compile_is_refused_with_the_compiler_message(tmp_path: Path) -> None:
    source = tmp_path / "broken.cc"
    source.write_text("int f() { return missing; }")
    with pytest.raises(RuntimeError, match="missing"):
        load_floor(source)
