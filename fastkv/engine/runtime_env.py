"""What the process environment needs before Paddle is imported.

Owns the environment variables of OpenMP and MKL that Paddle reads once, at import. Called first thing by the command
line and by the entry point of a worker process. Never imports Paddle itself, and never overrides what the user set.

Measured on two cores of an AMD server, 2048 x 2048 float32 matmul: one thread 19 GFLOP/s, one thread with the AVX2
path of MKL 37, both threads with it 72.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from fastkv.engine.interrupts import held_signals

logger = logging.getLogger(__name__)

_CPU_INFO = Path("/proc/cpuinfo")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_START_NOTICES = ("WARNING: OMP_NUM_THREADS set to", "PLEASE USE OMP_NUM_THREADS WISELY")


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut to the CPU quota of its container if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if _CGROUP_QUOTA.is_file():
        quota, _, period = _CGROUP_QUOTA.read_text().strip().partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def is_amd_cpu() -> bool:
    """Whether the first processor says AuthenticAMD; False where /proc/cpuinfo does not exist."""
    if not _CPU_INFO.is_file():
        return False
    with _CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
        return any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in lines)


def prepare_runtime(num_threads: int | None = None) -> bool:
    """Set the variables that Paddle reads at import, unless the user has set them.

    Args:
        num_threads: OpenMP threads; None means `usable_cores()`. OMP_NUM_THREADS in the environment wins.

    Returns:
        False, with a warning in the log and nothing changed, if Paddle is imported already.
    """
    if "paddle" in sys.modules:
        logger.warning(
            "paddle was imported before fastkv's runtime set-up: OMP_NUM_THREADS=%s stays as it is; call "
            "prepare_runtime() before the first import of paddle, or set OMP_NUM_THREADS yourself",
            os.environ.get("OMP_NUM_THREADS", "unset"),
        )
        return False
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads or usable_cores()))
    if is_amd_cpu():
        # MKL takes a slow path on AMD unless told that AVX2 is there.
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")
    return True


@contextlib.contextmanager
def quiet_paddle_import() -> Iterator[None]:
    """Hide the two notices Paddle prints to stderr at import when OMP_NUM_THREADS > 1, and one about ccache.

    Use as `with quiet_paddle_import(): import paddle`. Everything else printed meanwhile is passed on, also when
    the import fails. Ctrl-C and SIGTERM wait until it is over: in the middle an interrupt comes out as "ImportError:
    initialization failed", and Paddle catches SIGTERM, for ever, to print a C++ trace among the program's output.
    """
    real_stderr, caught = sys.stderr, io.StringIO()
    sys.stderr = caught
    try:
        with warnings.catch_warnings(), held_signals():
            warnings.filterwarnings("ignore", message="No ccache found")
            yield
    finally:
        sys.stderr = real_stderr
        for line in caught.getvalue().splitlines(keepends=True):
            if not line.startswith(_START_NOTICES):
                real_stderr.write(line)
