"""The environment that Paddle reads at import, seen in processes of their own; none of them imports Paddle."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import fastkv
from fastkv.engine import runtime_env

SHOW = (
    "import os, sys; from fastkv.engine.runtime_env import *; print(prepare_runtime({0}), "
    "os.environ.get('OMP_NUM_THREADS'), os.environ.get('MKL_DEBUG_CPU_TYPE'), 'paddle' in sys.modules)"
)


def _run(code: str, **environment: str) -> str:
    removed = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")
    inherited = {name: value for name, value in os.environ.items() if name not in removed}
    inherited["PYTHONPATH"] = str(Path(fastkv.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_prepare_sets_cores_and_mkl_path_without_importing_paddle() -> None:
    mkl = "5" if runtime_env.is_amd_cpu() else "None"
    assert _run(SHOW.format("")) == f"True {runtime_env.usable_cores()} {mkl} False"


def test_prepare_takes_threads_asked_for_but_environment_wins() -> None:
    assert _run(SHOW.format("3")).split()[1] == "3"
    assert _run(SHOW.format("3"), OMP_NUM_THREADS="1", MKL_DEBUG_CPU_TYPE="4") == "True 1 4 False"


def test_prepare_after_paddle_warns_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Setting the variable then would only pretend: the thread pools exist already."""
    monkeypatch.setitem(sys.modules, "paddle", sys)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with caplog.at_level(logging.WARNING):
        assert runtime_env.prepare_runtime() is False
    assert "OMP_NUM_THREADS=unset stays as it is" in caplog.text
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("max 100000", 8), ("10000 100000", 1)])
def test_usable_cores_respect_container_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    """Sixty-four threads on a quota of two cores are slower than two threads."""
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(runtime_env, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert runtime_env.usable_cores() == cores


def test_quiet_import_drops_known_notices_only(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy() -> None:
        print("WARNING: OMP_NUM_THREADS set to 2, not 1. The computation", file=sys.stderr)
        print("PLEASE USE OMP_NUM_THREADS WISELY.", file=sys.stderr)
        print("a real problem", file=sys.stderr)
        raise ImportError("no libpaddle")

    with pytest.raises(ImportError, match="no libpaddle"), runtime_env.quiet_paddle_import():
        noisy()
    assert capsys.readouterr().err == "a real problem\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_quiet_import_holds_signals_until_it_is_over_and_gives_them_back(number: int) -> None:
    """Paddle turns an interrupt of its import into an ImportError, and takes SIGTERM behind Python's back."""
    heard: list[int] = []
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        with runtime_env.quiet_paddle_import():
            signal.raise_signal(number)
            assert not heard
            ctypes.CDLL(None).signal(int(number), None)  # SIG_DFL, as far as the system knows
        assert heard == [number]
        signal.raise_signal(number)
        assert heard == [number] * 2
    finally:
        signal.signal(number, before)


def test_quiet_import_in_another_thread_leaves_signals_alone() -> None:
    done: list[bool] = []

    def work() -> None:
        with runtime_env.quiet_paddle_import():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
