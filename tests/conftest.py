"""Prepares the environment that Paddle reads once, before any test module imports Paddle, and lets Ctrl-C be tested."""

from __future__ import annotations

import signal
from pathlib import Path

from fastkv.engine.runtime_env import prepare_runtime

prepare_runtime()
# a shell that starts tests in the background lets them, and all that they start, ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Says what a log of this machine covers: kernels are tested with each instruction set that the CPU has."""
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    has, lacks = ([flag for flag in wanted if (flag in flags) is found] for found in (True, False))
    return f"instruction sets: has {' '.join(has) or 'none'}; lacks {' '.join(lacks) or 'none'}"
