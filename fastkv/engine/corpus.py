"""Real text for calibration and evaluation: a file of the user's, or the reference manual that ships with Python.

The manual (pydoc_data.topics) is some 600 KB of English prose and code that every CPython brings, so calibration and
evaluation need no download. The two purposes take different halves of it: what calibrates is not what evaluates.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal

from fastkv.errors import ConfigError

Purpose = Literal["calibrate", "evaluate"]


def load_text(path: str | None, purpose: Purpose) -> str:
    """The text to run.

    Args:
        path: a UTF-8 file; None takes Python's reference manual.
        purpose: which half of the manual.

    Raises:
        ConfigError: unreadable or empty file, or a Python without its manual.
    """
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text file {path} cannot be read: {error}") from None
        if not text.strip():
            raise ConfigError(f"text file {path} is empty; give one with some pages of text")
        return text
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ConfigError("this Python ships without its reference manual; give a text with --text FILE") from None
    names = sorted(topics)
    half = names[0::2] if purpose == "calibrate" else names[1::2]
    return "\n\n".join(topics[name] for name in half)
