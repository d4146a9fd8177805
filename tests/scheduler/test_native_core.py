"""Finding the native core: one that was built from other sources is refused before anything is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastkv.errors import ConfigError
from fastkv.scheduler import _native

ROOT = Path(__file__).parents[2]


def test_core_in_a_source_tree_was_built_from_its_sources() -> None:
    assert _native.core.built_from == _native.sources_digest(ROOT / "custom_ops" / "core")


@pytest.mark.parametrize("built_from", ["", "0123456789abcdef" * 4])
def test_core_of_other_sources_is_refused_with_the_remedy(tmp_path: Path, built_from: str) -> None:
    """Built before there was a stamp, or from sources that have changed since."""
    (tmp_path / "row.h").write_text("int row;\n")
    with pytest.raises(ConfigError, match=r"built from other sources than .* holds \((unknown|0123456789ab) .*setup"):
        _native.check_built_from(built_from, tmp_path)
    _native.check_built_from(_native.sources_digest(tmp_path), tmp_path)


def test_sources_digest_changes_with_any_file_name_or_byte(tmp_path: Path) -> None:
    seen = set()
    for name, text in (("a.cc", "1"), ("a.cc", "2"), ("b.h", "2"), ("c.txt", "2")):
        (tmp_path / name).write_text(text)
        seen.add(_native.sources_digest(tmp_path))
    assert len(seen) == 3, "text files are no sources"


def test_core_without_sources_beside_it_is_taken_as_it_is(tmp_path: Path) -> None:
    """An installed package."""
    _native.check_built_from("", tmp_path / "no such folder")


def test_missing_core_is_a_config_error_with_the_remedy() -> None:
    code = (
        "import sys; sys.modules['fastkv._core'] = None\n"
        "try:\n    from fastkv import CacheManager\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("ConfigError the native scheduler core cannot be loaded"), done.stderr
    assert "make setup" in done.stdout
