"""setup.py: its choice of a compiler, and what it packs. It builds when imported, so a process that cannot reads it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

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


def test_source_distribution_holds_everything_that_is_compiled(tmp_path: Path) -> None:
    """It held no header once, so nobody could install from it."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = [ROOT / "custom_ops" / part for part in ("include", "cpu", "paddle", "core")]
    needed = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cc")]
    assert len(needed) > 50
    assert {str(path.relative_to(ROOT)) for path in needed if "tests" not in path.parts} <= packed
    assert {"fastkv/py.typed", "fastkv/_core.pyi"} <= packed
