"""Reading a GGUF file: metadata, and tensors as raw quantised rows.

Owns the file format (little-endian, versions 2 and 3) and the step from quantised rows to float32. Called by
`gguf_weights` (geometry, weights) and `tokenizer` (vocabulary). The file is memory-mapped; raw tensors are views of
the map and stay valid as long as anything refers to them.

    | magic, version, counts | key-value pairs | tensor infos | padding | tensor data, each tensor aligned |

Why an own reader of the header: `gguf.GGUFReader` makes a NumPy array of every token of the vocabulary, 5.9 s for the
demo model against 0.15 s here. Why own decoders for the types the demo model uses: 2.2 s against 0.7 s for its 538 MB.
All other types go through `gguf.dequantize`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fastkv.errors import ConfigError

RawRows = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in _SCALAR_CODES.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_STRING, _ARRAY = 8, 9
_CHUNK_ROWS = 256  # rows decoded at a time, so that intermediates stay in the cache of a core


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it lies in the file.

    `rows` is uint8 [product of the outer dimensions, bytes of one row], read-only; `shape` is the logical shape,
    outermost dimension first; `type_id` is GGML's number of the quantisation type.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    rows: RawRows


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed file: `metadata` by key (str, int, float, bool or a list of one of them), `tensors` by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The metadata value under `key`. Raises ConfigError if it is absent or not of `kind`."""
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(k.__name__ for k in kinds)
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise ConfigError(f"{self.path}: metadata {key!r} {found}, expected {names}; convert the model again")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and parse its header; no tensor byte is touched.

    Raises:
        ConfigError: the file cannot be opened, is not GGUF, is cut short or of an unknown version.
    Cost: about 0.2 s for a vocabulary of 50,000 tokens and as many merges.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model file {path} cannot be read: {error}; give the path of a .gguf file") from error
    if data[:4] != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it starts with {data[:4]!r}, not {_MAGIC!r}")
    cursor = _Cursor(data, len(_MAGIC))
    try:
        return _parse(path, cursor)
    except (struct.error, _BrokenFileError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a readable GGUF file, its header breaks at byte {cursor.offset} of {len(data)}: {error}; "
            "fetch the file again"
        ) from error


class _BrokenFileError(ValueError):
    """The header contradicts itself or the size of the file."""


class _Cursor:
    """A position in the mapped file; every read checks the end of the file."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data, self.offset = data, offset

    def scalar(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return value

    def string(self) -> str:
        length = self.scalar(_U64)
        end = self.offset + length
        if end > len(self.data):
            raise _BrokenFileError(f"a string of {length} bytes runs past the end")
        raw = self.data[self.offset : end]
        self.offset = end
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar(_U32), self.scalar(_U64))
        if kind not in _SCALARS:
            raise _BrokenFileError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self, kind: int, count: int) -> list[Any]:
        if count > len(self.data):
            raise _BrokenFileError(f"an array of {count} items does not fit the file")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _BrokenFileError(f"arrays of value type {kind} are not supported")
        layout = struct.Struct(f"<{count}{_SCALAR_CODES[kind]}")
        items = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return list(items)


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    version = cursor.scalar(_U32)
    if version not in _VERSIONS:
        raise ConfigError(f"{path} is GGUF version {version}; versions {_VERSIONS} (little-endian) can be read")
    num_tensors, num_pairs = cursor.scalar(_U64), cursor.scalar(_U64)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    infos = []
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar(_U32)
        # The file lists the innermost dimension first.
        shape = tuple(cursor.scalar(_U64) for _ in range(num_dims))[::-1]
        infos.append((name, shape, cursor.scalar(_U32), cursor.scalar(_U64)))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _BrokenFileError(f"general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {info[0]: _map_tensor(cursor.data, start, *info) for info in infos}
    return GGUFFile(path, MappingProxyType(metadata), MappingProxyType(tensors))


def _map_tensor(data: mmap.mmap, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> RawTensor:
    block_values, block_bytes = _block_size(type_id)
    columns = shape[-1] if shape else 1
    if columns % block_values:
        raise _BrokenFileError(f"tensor {name}: rows of {columns} values are no multiple of {block_values}")
    row_bytes = columns // block_values * block_bytes
    num_rows = 1
    for dim in shape[:-1]:
        num_rows *= dim
    begin, num_bytes = start + offset, num_rows * row_bytes
    if begin + num_bytes > len(data):
        raise _BrokenFileError(f"tensor {name} needs bytes {begin} to {begin + num_bytes}, past the end of the file")
    rows = np.frombuffer(data, np.uint8, num_bytes, begin).reshape(num_rows, row_bytes)
    return RawTensor(name, shape, type_id, rows)


def dequantize_into(raw: RawTensor, out: FloatArray, rows: npt.NDArray[np.int64] | None = None) -> None:
    """Decode a tensor to float32.

    Args:
        raw: the tensor.
        out: float32 [number of rows, columns], C-contiguous; may be a slice of a larger matrix.
        rows: int64 [number of rows], the order in which rows are taken; None for the file's order.

    Raises:
        ConfigError: the quantisation type cannot be decoded.
    """
    source = raw.rows if rows is None else raw.rows[rows]
    decode = _DECODERS.get(raw.type_id)
    for begin in range(0, len(source), _CHUNK_ROWS):
        chunk = source[begin : begin + _CHUNK_ROWS]
        target = out[begin : begin + _CHUNK_ROWS]
        if decode is not None:
            decode(chunk, target)
        else:
            target[...] = _decode_with_package(chunk, raw)


def _decode_f32(rows: RawRows, out: FloatArray) -> None:
    out[...] = rows.view(np.float32)


def _decode_f16(rows: RawRows, out: FloatArray) -> None:
    out[...] = rows.view(np.float16)


def _decode_q4_1(rows: RawRows, out: FloatArray) -> None:
    """Blocks of 32 values: f16 step, f16 minimum, 16 bytes with values 0-15 in the low nibbles, 16-31 in the high."""
    blocks = rows.reshape(-1, 20)
    step_and_min = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    step, codes, target = step_and_min[:, :1], blocks[:, 4:], out.reshape(-1, 2, 16)
    np.multiply(codes & 15, step, out=target[:, 0])
    np.multiply(codes >> 4, step, out=target[:, 1])
    target += step_and_min[:, 1:, None]


def _decode_q8_0(rows: RawRows, out: FloatArray) -> None:
    """Blocks of 32 values: f16 step, 32 signed bytes."""
    blocks = rows.reshape(-1, 34)
    step = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    np.multiply(blocks[:, 2:].view(np.int8), step, out=out.reshape(-1, 32))


# GGML's type number -> (values in a block, bytes of a block), and the decoder.
_BLOCK_SIZES = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}
_DECODERS: Mapping[int, Callable[[RawRows, FloatArray], None]] = MappingProxyType(
    {0: _decode_f32, 1: _decode_f16, 3: _decode_q4_1, 8: _decode_q8_0}
)


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "this GGUF file uses a quantisation type that needs the gguf package: pip install gguf"
        ) from error
    return gguf


def _block_size(type_id: int) -> tuple[int, int]:
    if type_id in _BLOCK_SIZES:
        return _BLOCK_SIZES[type_id]
    sizes = _gguf_package().GGML_QUANT_SIZES
    for kind, size in sizes.items():
        if int(kind) == type_id:
            return int(size[0]), int(size[1])
    raise ConfigError(f"GGML quantisation type {type_id} is unknown; convert the model to F16, Q8_0 or Q4_1")


def _decode_with_package(rows: RawRows, raw: RawTensor) -> FloatArray:
    gguf = _gguf_package()
    kind = gguf.GGMLQuantizationType(raw.type_id)
    try:
        values: FloatArray = gguf.dequantize(rows, kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"tensor {raw.name} is stored as {kind.name}, which cannot be decoded; convert the model to F16, Q8_0 "
            "or Q4_1"
        ) from error
    return values
