"""The C++ table of storage types equals the Python one, row by row: bounds are written down once a language."""

from __future__ import annotations

import ctypes

from fastkv.core.dtype import STORAGE_DTYPES
from fastkv.ops import load_ops


def compiled_rows() -> list[str]:
    library, rows = load_ops(), []
    text = ctypes.create_string_buffer(128)
    while library.fastkv_storage_row(len(rows), text, len(text)):
        rows.append(text.value.decode())
    return rows


def test_storage_table_compiled_equals_python() -> None:
    expected = [
        f"{row.name} {row.bits or 0} {row.bound:g} {row.code_min:g} {int(row.has_zero_point)} {row.scales.value}"
        for row in STORAGE_DTYPES.values()
    ]
    assert compiled_rows() == expected


def test_storage_table_row_past_the_end_is_refused() -> None:
    text = ctypes.create_string_buffer(128)
    assert load_ops().fastkv_storage_row(-1, text, len(text)) == 0
    assert load_ops().fastkv_storage_row(len(STORAGE_DTYPES), text, len(text)) == 0
