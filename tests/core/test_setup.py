"""setup.py: its choice of a compiler, and what it packs. It builds when imported, so a process that cannot reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = "import setuptools; setuptools.setup = lambda **_: None; import setup; print({})"


def ask(expression: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE.format(expression)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def test_compiler_of_several_words_is_used_as_given() -> None:
    """It was silently replaced by g++ once: no program is called "env g++"."""
    assert ask("setup.find_compiler()", CXX="env g++ -m64").stdout == "['env', 'g++', '-m64']\n"


def test_compiler_that_is_not_installed_is_refused_by_name() -> None:
    done = ask("setup.find_compiler()", CXX="no-such-compiler -O2")
    assert done.returncode == 1
    assert "CXX is 'no-such-compiler', which is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_compiler_cache_in_front_makes_no_object_stale() -> None:
    shown = ask("setup.without_launcher(['/usr/bin/ccache', 'g++', '-c']), setup.without_launcher(['g++', '-c'])")
    assert shown.stdout == "['g++', '-c'] ['g++', '-c']\n"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_source_distribution_holds_everything_that_is_compiled(machine: str, tmp_path: Path) -> None:
    """It held no header once, so nobody could install from it; one made on ARM could not be installed on x86.

    egg_info lists what sdist packs; sdist itself would copy it all into the checkout.
    """
    arguments = ["setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    code = f"import platform, sys; platform.machine = lambda: {machine!r}; sys.argv = {arguments!r}; import setup"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    packed = set((tmp_path / "fastkv.egg-info" / "SOURCES.txt").read_text().splitlines())
    folders = [ROOT / "custom_ops" / part for part in ("include", "cpu", "paddle", "core")]
    sources = [
        path.relative_to(ROOT) for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cc")
    ]
    needed = {str(path) for path in sources if "tests" not in path.parts}
    assert len(needed) > 50
    assert needed <= packed
    assert {"fastkv/py.typed", "fastkv/_core.pyi"} <= packed
