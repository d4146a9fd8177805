"""setup.py's choice of a compiler. The file builds when it is imported, so it is read in a process that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
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
