"""fastkv generate and plan as a person types them: output, JSON, and every mistake a message instead of a traceback."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.engine import tiny_config
from helpers.toy import toy_data
from rich.console import Console

from fastkv.cli.generate import read_prompts, report_table
from fastkv.cli.main import main
from fastkv.cli.options import format_bytes
from fastkv.engine.llm import LLM

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "configs" / "smollm2.yaml"
COMMAND = [sys.executable, "-m", "fastkv.cli.main"]
SMALL = ["--device-memory", "64MiB"]


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, cwd=ROOT, **options)


@pytest.fixture
def toy_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_data()))
    return path


def test_generate_json_prints_one_object_with_outputs_and_report(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "The capital of France is"}\n\n{"prompt": "Water boils at"}\n')
    done = run("generate", str(SMOLLM2), "--prompts", str(prompts), "--max-tokens", "3", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["outputs"][0]["text"].startswith(" Paris.")
    assert len(data["outputs"]) == 2
    assert len(data["outputs"][0]["token_ids"]) == 3
    report = data["report"]
    assert (report["storage_dtype"], report["cache_manager"], report["prefix_hit_tokens"]) == ("float32", "v1", 0)
    assert report["host_cache_bytes"] > 0
    assert report["mtp_cache_bytes"] == 0
    assert report["decode_tokens_per_s"] > 0
    assert report["prefill_tokens_per_s"] > 0
    assert 0 < report["device_cache_bytes"] <= 64 << 20


def test_output_that_the_terminal_cannot_encode_is_replaced_and_a_closed_one_is_dropped() -> None:
    """Both were tracebacks: a Latin-1 terminal, and a service without stdout."""
    command = ["generate", str(SMOLLM2), "--prompt", "Voil\u00e0", "--max-tokens", "1", *SMALL]
    done = run(*command, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout[:5]) == (0, "Voil?"), done.stderr
    shell = shlex.join([*COMMAND, "plan", str(SMOLLM2)]) + " >&-"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("encoding", "errors", "kept"),
    [
        ("ascii", "strict", "replace"),
        ("ascii", "surrogateescape", "replace"),  # a locale "C" where Python may not make it UTF-8
        ("utf-8", "surrogateescape", "surrogateescape"),  # where it does: file names that are no text come out whole
        ("ascii", "backslashreplace", "backslashreplace"),  # as stderr always is
    ],
)
def test_stream_that_has_a_way_with_every_text_keeps_it(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str, kept: str
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding, errors))
    assert main(["plan", "nowhere-é"]) == 1
    assert (sys.stdout.errors, sys.stderr.errors) == (kept, kept)


def test_report_counts_the_caches_of_mtp_layers_as_device_memory() -> None:
    config = tiny_config(speculation={"num_layers": 1})
    with LLM(config) as llm:
        report = llm.generate([[1, 2, 3]], max_tokens=1).report
    console = Console(width=100)
    with console.capture() as shown:
        console.print(report_table(report))
    assert f"device {format_bytes(config.capacity_plan().device_bytes)}, host" in shown.get()


def test_report_shows_a_failure_with_brackets_as_it_is() -> None:
    """A path in it, such as [/store], was markup that closes nothing: the report ended in a traceback."""
    with LLM(tiny_config()) as llm:
        report = llm.generate([[1, 2, 3]], max_tokens=1).report
    moved = replace(report.moved, failed_transfers=1)
    report = replace(report, moved=moved, transfer_error="no [/copy]", storage_error="[/store]")
    console = Console(width=100)
    with console.capture() as shown:
        console.print(report_table(report))
    assert "no [/copy]" in shown.get()
    assert "[/store]" in shown.get()


def test_generate_streams_text_and_reports_on_stderr() -> None:
    command = ["generate", str(SMOLLM2), "--prompt", "The capital of France is", "--max-tokens", "2"]
    done = run(*command, "--kv-cache-quant-type", "int8", "--cache-manager", "v0", "--worker", "process", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert "stored as uint8 (int8)" in done.stderr
    assert "Traceback" not in done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "words"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_generate_ended_by_a_signal_closes_and_leaves_no_worker_behind(number: int, code: int, words: str) -> None:
    """As a terminal does it with Ctrl-C, and a service manager: engine and worker both get the signal."""
    command = [*COMMAND, "generate", str(SMOLLM2), "--prompt", "Once", "--max-tokens", "4000", "--worker", "process"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    worker = _wait_for(lambda: children.read_text().split())[0]
    assert process.stdout is not None
    assert process.stdout.read(4) == "Once"  # the engine is up and its text flows
    os.killpg(process.pid, number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code
    assert stderr.strip().splitlines()[-1] == f"fastkv: {words}"
    assert "Traceback" not in stderr
    assert "Error" not in stdout, "Paddle's own handler prints there"
    _wait_for(lambda: not Path(f"/proc/{worker}").exists())


@pytest.mark.parametrize("module", ["numpy", "fastkv.cli.plan", "rich.table"])
def test_command_interrupted_while_it_is_imported_says_so_without_a_traceback(module: str) -> None:
    """Ctrl-C in the first half second hit the imports, and came out as a traceback through somebody's library."""
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from fastkv.cli.main import main\n"
        f"sys.exit(main(['plan', {str(SMOLLM2)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fastkv: interrupted\n")


def _wait_for(condition: Any, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "x", "--kv-cache-quant-type", "int3"], "unknown kv_cache_quant_type 'int3'"),
        (["--prompt", "x", "--cache-manager", "v7"], "'v7' is not allowed; allowed: v0, v1"),
        (["--prompt", "x", "--device-memory", "1KiB"], "below one block"),
        (["--prompt", "x", "--device-memory", "lots"], "'lots' is no size"),
        (["--prompt", "x", "--block-size", "0"], "cache.block_size"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    ],
)
def test_generate_mistake_is_one_message_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert main(["generate", str(SMOLLM2), *args]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("fastkv: error:") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("  \n", "the prompt is empty"),
        ("word " * 9000, "context holds 8192"),
        ("word " * 2000, "do not fit the cache of"),
    ],
)
def test_generate_prompt_that_cannot_run_is_refused(
    capsys: pytest.CaptureFixture[str], prompt: str, message: str
) -> None:
    assert main(["generate", str(SMOLLM2), "--prompt", prompt, *SMALL]) == 1
    assert message in capsys.readouterr().err


def test_prompts_file_with_line_separators_inside_a_text_is_read_whole(tmp_path: Path) -> None:
    """JSON may hold U+2028, U+0085 and the like as they are; only a newline ends a line."""
    path, text = tmp_path / "prompts.jsonl", "one\u2028two\u0085three"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n\n", encoding="utf-8")
    assert read_prompts(path) == [text]


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 3}', '{"text": "x"}', '"x"'])
def test_generate_broken_prompts_file_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["generate", str(SMOLLM2), "--prompts", str(path)]) == 1
    assert f"{path}:2: expected an object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"weights": "missing.gguf"}}, "missing.gguf"),
        ({"model": {"weights": "package:no_such_package"}}, "no_such_package"),
        ({"model": {"weights": None}}, "has no weights in its config"),
        ({"model": {"num_layers": 29}}, "num_layers is 29, the weights have 30"),
        ({"cache": {"scales_file": "missing.json", "kv_cache_quant_type": "int8"}}, "fastkv calibrate"),
        ({"cache": {"scales_file": None, "kv_cache_quant_type": "int8"}}, "needs static scales"),
    ],
)
def test_generate_config_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, dict[str, Any]], message: str
) -> None:
    data = yaml.safe_load(SMOLLM2.read_text())
    for section, keys in changes.items():
        data[section].update(keys)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    assert main(["generate", str(path), "--prompt", "x", *SMALL]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_generate_prompt_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\ud800b"}\n')
    assert main(["generate", str(SMOLLM2), "--prompts", str(path), *SMALL]) == 1
    captured = capsys.readouterr()
    assert "no text that can be encoded" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("package", "extra"), [("paddle", "cpu"), ("tokenizers", "demo")])
def test_generate_without_an_extra_names_it(package: str, extra: str) -> None:
    """What somebody meets after a plain `pip install fastkv`."""
    code = f"import sys; sys.modules['{package}'] = None; from fastkv.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", str(SMOLLM2), "--prompt", "x", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert f"needs the Python package {package}" in done.stderr
    assert f"fastkv[{extra}]" in done.stderr


def test_output_on_a_full_disk_is_an_error() -> None:
    command = [*COMMAND, "plan", str(SMOLLM2), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.strip() == "fastkv: error: the output cannot be written: No space left on device"


def test_plan_json_agrees_with_the_spec(toy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(toy_file), "--kv-cache-quant-type", "int4_zp", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["storage_dtype"], data["block_bytes"], data["bytes_per_token"]) == ("uint8", 192, 48)
    assert data["num_device_blocks"] == 4
    assert data["full_length_requests"] == 0
    roles = data["groups"][1]["roles"]
    assert roles[0] == {"role": "key", "dtype": "uint8", "shape": [4, 2, 4, 4], "block_bytes": 32}
    assert sum(group["device_bytes"] for group in data["groups"]) == data["device_bytes"] == 4 * 192


def test_plan_compare_lists_every_legal_type(toy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(toy_file), "--compare", "--device-memory", "7680", "--json"]) == 0
    rows = {row["kv_cache_quant_type"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["num_device_blocks"] for name, row in rows.items()} == {
        "none": 10,
        "int8": 20,
        "int8_zp": 20,
        "float8_e4m3fn": 20,
        "float8_e4m3fn_zp": 20,
        "block_wise_fp8": 13,
        "int8_token": 13,
        "int4_zp": 40,
    }


def test_plan_table_is_readable(toy_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(toy_file)]) == 0
    out = capsys.readouterr().out
    assert "bfloat16" in out
    assert "[4, 2, 4, 8]" in out
    assert "bytes a token" in out


def test_command_line_that_is_no_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["generat"])
    assert error.value.code == 2
    assert "generate" in capsys.readouterr().err
