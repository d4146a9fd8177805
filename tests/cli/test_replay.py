"""`fastkv replay` as a person and as a script use it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from helpers.traces import make_trace, naive_replay

from fastkv.cli.main import main
from fastkv.config import load_config

BLOCK = 32
KEYS = {"blocks", "policy", "hit_blocks", "hit_rate", "evictions", "manager_seconds"}
LINES = make_trace(300, BLOCK, seed=5)
CONFIG = """
model: {name: toy, attention: gqa, num_layers: 2, num_attention_heads: 4, num_kv_heads: 2, head_dim: 8,
        max_context: 4096}
cache: {block_size: 16, device_memory: 1MiB}
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "toy.jsonl"
    path.write_text("".join(line.json() + "\n" for line in LINES))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "toy.yaml"
    path.write_text(CONFIG)
    return str(path)


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, object]]:
    assert main(["replay", *args, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["replay", *args]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_replay_json_without_sizes_is_one_unbounded_row(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    (row,) = rows(capsys, trace)
    assert set(row) == KEYS
    hits, _ = naive_replay(LINES, BLOCK)
    total = sum(len(line.hash_ids) for line in LINES)
    assert (row["blocks"], row["policy"], row["hit_blocks"], row["evictions"]) == (0, "lru", hits, 0)
    assert row["hit_rate"] == hits / total


def test_replay_blocks_list_gives_a_row_a_size_in_the_order_given(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    found = rows(capsys, trace, "--blocks", "90,40", "--blocks", "0,40")
    assert [row["blocks"] for row in found] == [90, 40, 0]
    for row, limit in zip(found, (90, 40, None), strict=True):
        assert (row["hit_blocks"], row["evictions"]) == naive_replay(LINES, BLOCK, limit)


def test_replay_policies_are_rows_of_their_own(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    found = rows(capsys, trace, "--blocks", "40,90", "--policy", "lru,2q")
    assert [(row["policy"], row["blocks"]) for row in found] == [("lru", 40), ("lru", 90), ("2q", 40), ("2q", 90)]
    assert found[0]["hit_blocks"] != found[2]["hit_blocks"]


def test_replay_memory_counts_bytes_of_the_config_in_blocks_of_the_trace(
    capsys: pytest.CaptureFixture[str], trace: str, config: str
) -> None:
    block_bytes = load_config(config, {"cache.block_size": BLOCK}).cache_spec().pool_block_bytes
    found = rows(capsys, trace, config, "--memory", "1MiB", "--memory", f"{40 * block_bytes + 1}")
    assert [row["blocks"] for row in found] == [2**20 // block_bytes, 40]


def test_replay_config_without_sizes_uses_the_memory_it_gives(
    capsys: pytest.CaptureFixture[str], trace: str, config: str
) -> None:
    (row,) = rows(capsys, trace, config)
    spec = load_config(config, {"cache.block_size": BLOCK}).cache_spec()
    assert row["blocks"] == 2**20 // spec.pool_block_bytes


def test_replay_table_goes_to_stdout_and_says_what_was_too_long(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["replay", trace, "--blocks", "20,0"]) == 0
    shown = capsys.readouterr()
    hits, _ = naive_replay(LINES, BLOCK)
    assert "300 requests" in shown.out
    assert f"blocks of {BLOCK} tokens" in shown.out
    assert "unbounded" in shown.out
    assert f"{hits:,}" in shown.out
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    too_long = sum(len(line.hash_ids) > 20 for line in LINES)
    assert f"a cache of 20 blocks is too small for {too_long} requests" in shown.err


def test_replay_reads_standard_input(
    capsys: pytest.CaptureFixture[str], trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(trace).open("rb") as file:
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=file))
        (row,) = rows(capsys, "-")
    assert row["hit_blocks"] == naive_replay(LINES, BLOCK)[0]


def test_replay_of_a_broken_line_names_file_and_line(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    with Path(trace).open("a") as file:
        file.write("not json\n")
    assert f"{trace} line 301 is no request" in refused(capsys, trace)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory", "1GiB"], "--memory needs a CONFIG"),
        (["--blocks", "10,x"], "--blocks 'x' is no number of blocks"),
        (["--blocks", "-3"], "--blocks '-3' is no number of blocks"),
        (["--policy", "random"], "--policy 'random' is unknown; allowed: lru"),
        (["--block-tokens", "0"], "--block-tokens 0 must be at least 1"),
    ],
)
def test_replay_refuses_impossible_flags(
    capsys: pytest.CaptureFixture[str], trace: str, args: list[str], message: str
) -> None:
    assert message in refused(capsys, trace, *args)


def test_replay_refuses_a_missing_trace_and_too_little_memory(
    capsys: pytest.CaptureFixture[str], trace: str, config: str
) -> None:
    assert "cannot be read: No such file" in refused(capsys, trace + ".gone")
    assert "is below one block" in refused(capsys, trace, config, "--memory", "64")


def test_replay_plot_without_matplotlib_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = refused(capsys, trace, "--plot", str(tmp_path / "curve.png"))
    assert "--plot needs matplotlib" in message
    assert "fastkv[plot]" in message


class RecordingAxes:
    """Stands in for matplotlib where it is not installed: keeps what was drawn."""

    def __init__(self) -> None:
        self.curves: dict[str, tuple[list[int], list[float]]] = {}
        self.lines: list[float] = []
        self.xaxis = self

    def plot(self, x: list[int], y: list[float], *, label: str, **_: object) -> None:
        self.curves[label] = (x, y)

    def axhline(self, y: float, **_: object) -> None:
        self.lines.append(y)

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: self


def test_replay_plot_draws_a_curve_a_policy_and_the_limit(
    capsys: pytest.CaptureFixture[str], trace: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes, saved = RecordingAxes(), []
    figure = types.SimpleNamespace(add_subplot=lambda: axes, savefig=lambda path, **_: saved.append(str(path)))
    module = types.SimpleNamespace(Figure=lambda **_: figure)
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    found = rows(capsys, trace, config, "--blocks", "90,40", "--plot", "curve.png")
    assert [row["blocks"] for row in found] == [90, 40, 0]
    assert saved == ["curve.png"]
    rates = [100 * float(str(row["hit_rate"])) for row in found]
    assert axes.curves == {"lru": ([40, 90], [rates[1], rates[0]])}
    assert axes.lines == [rates[2]]


def test_replay_plot_writes_a_png_or_says_why_not(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    picture = tmp_path / "curve.png"
    found = rows(capsys, trace, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    sizes = [row["blocks"] for row in found]
    assert len(sizes) == 10
    assert sizes == [*sorted(sizes[:-1]), 0]
    assert main(["replay", trace, "--plot", str(tmp_path / "missing" / "x.png")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_replay_docs_recipe_writes_a_trace_that_replays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What docs/replay.md tells people to run on their own logs is run here."""
    text = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    recipe: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], recipe)
    prompt = list(range(1000, 1150))
    path = tmp_path / "own.jsonl"
    recipe["write_trace"]([(2, [*prompt, 7, 8]), (1, prompt), (3, prompt[:64])], path)
    (row,) = rows(capsys, str(path))
    assert row["hit_blocks"] == 2  # 128 tokens of the second; the third ends on its block and computes it again
