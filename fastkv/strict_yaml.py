"""Strict reading of YAML: no key twice, and every mistake is told by key path, value and what is allowed.

Called by config.py only. The shape of a config is a msgspec Struct; msgspec finds what does not fit, `explain` turns
its finding into a sentence for the person who wrote the file.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Hashable, Mapping
from typing import Any, Literal

import msgspec
import yaml

from fastkv.errors import ConfigError


class at:
    """Prefix ConfigErrors raised inside with the key path or the file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise ConfigError(f"{self.where}: {error}") from None


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last, and keys that are no words."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """See yaml.SafeLoader."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def place_of(error: yaml.YAMLError) -> str:
    """What is wrong and where, without the parser's name for text that it read from no file."""
    return str(error).replace('in "<unicode string>", ', "")


def explain(problem: str, data: Mapping[str, Any], root: type[msgspec.Struct]) -> str:
    """Turn msgspec's message (type problem at $.a.b) into key path, value, what is allowed.

    Args:
        problem: text of the ValidationError.
        data: what was given.
        root: the struct that it did not fit.
    """
    text, _, path = problem.partition(" - at `$.")
    keys = path.rstrip("`").split(".") if path else []
    section: Any = root
    hint: Any = root
    value: Any = data
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
        hint = typing.get_type_hints(section).get(key)
        section = next((t for t in _alternatives(hint) if isinstance(t, type) and issubclass(t, msgspec.Struct)), None)
    where = ".".join(keys) or "config"
    if unknown := re.search(r"unknown field `(.*)`", text):
        return f"{where}: {unknown_key(unknown[1], section)}"
    if missing := re.search(r"missing required field `(.*)`", text):
        return f"{where}: the key {missing[1]!r} is missing"
    words = [w for t in _alternatives(hint) if typing.get_origin(t) is Literal for w in typing.get_args(t)]
    if words:
        allowed = f"allowed: {', '.join(words)}"
    elif section is not None:
        allowed = f"expected a mapping with the keys {field_names(section)}"
    else:
        allowed = text[0].lower() + text[1:]
    return f"{where}: {value!r} is not allowed; {allowed}"


def unknown_key(key: str, section: type[msgspec.Struct]) -> str:
    """A sentence about a key that the section does not have."""
    allowed = field_names(section)
    near = difflib.get_close_matches(key, allowed.split(", "), n=1)
    return f"unknown key {key!r}{f' (did you mean {near[0]}?)' if near else ''}; allowed: {allowed}"


def field_names(section: type[msgspec.Struct]) -> str:
    """The keys of a section that a file may hold."""
    return ", ".join(name for name in section.__struct_fields__ if name != "base_dir")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return (hint,) if typing.get_origin(hint) is Literal else (hint, *typing.get_args(hint))


def override(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a file's sections with the keys that dotted paths name replaced. Raises ConfigError."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        target = merged.get(section)
        if target is None:
            target = merged[section] = {}
        if not isinstance(target, dict):
            raise ConfigError(f"{section}: expected a mapping, got {target!r}")
        target[key] = value
    return merged
