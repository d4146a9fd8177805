"""The arrows of the design: which part may import which. Read from the source with ast, so nothing has to be run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fastkv"

# part -> the fastkv parts it may import, itself apart. config hands out core's types; core never reads config.
ALLOWED = {
    "errors": set(),
    "core": {"errors"},
    "strict_yaml": {"errors"},
    "config": {"errors", "core", "strict_yaml"},
    "scheduler": {"errors", "core", "_core"},
    "storage": {"errors", "core"},
    "ops": {"errors", "core"},
    "worker": {"errors", "core", "config", "ops", "storage"},
    "engine": {"errors", "core", "config", "ops", "worker", "scheduler", "storage"},
    "cli": {"errors", "core", "config", "ops", "worker", "scheduler", "storage", "engine"},
    "__init__": {"errors", "core", "config", "scheduler", "storage", "worker"},
}
PADDLE_FREE = {"errors", "core", "config", "strict_yaml", "scheduler", "storage"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "fastkv":
                submodules = {alias.name for alias in node.names} & ALLOWED.keys()
                names.update(f"fastkv.{name}" for name in submodules)
    return names


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_arrows_point_one_way(path: Path) -> None:
    part = part_of(path)
    names = imported(path)
    parts = {name.split(".")[1] for name in names if name.startswith("fastkv.")}
    assert parts - {part} <= ALLOWED[part]
    if part in PADDLE_FREE or path.name == "reference.py":
        assert not any(name.split(".")[0] == "paddle" for name in names)
    if part == "core":
        assert not names & {"os", "pathlib", "io", "socket", "subprocess"}


@pytest.mark.parametrize(
    "module", ["fastkv", "fastkv.config", "fastkv.scheduler.manager", "fastkv.ops.reference", "fastkv.cli.main"]
)
def test_import_without_paddle(module: str) -> None:
    code = f"import sys; sys.modules['paddle'] = None; import {module}; assert '{module}' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_package_looked_through_by_help_needs_no_paddle() -> None:
    """help() and inspect get every name that dir() lists: the worker's names imported paddle."""
    code = (
        "import sys; sys.modules['paddle'] = None; import inspect, fastkv; names = dict(inspect.getmembers(fastkv)); "
        "assert 'CacheManager' in names and 'CacheController' not in names"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
