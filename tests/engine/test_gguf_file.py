"""The header reader and the decoders against the gguf package, and files that are broken."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.tiny_gguf import write_gguf

from fastkv.engine.gguf_file import GGUFFile, dequantize_into, read_gguf
from fastkv.errors import ConfigError

Kind = gguf.GGMLQuantizationType


def test_header_of_written_file_equals_package_reader(tiny_gguf: Path) -> None:
    ours, theirs = read_gguf(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mapped = ours.tensors[tensor.name]
        assert mapped.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert mapped.type_id == tensor.tensor_type
        np.testing.assert_array_equal(mapped.rows.reshape(-1).view(np.float32), np.asarray(tensor.data).reshape(-1))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_1, Kind.Q8_0, Kind.Q4_0, Kind.BF16])
def test_decoding_each_type_equals_package(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The first four have decoders of ours; 300 rows are more than one chunk."""
    values = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    rows = gguf.quantize(values, kind)
    path = write_gguf(tmp_path / "q.gguf", {}, {}, {"w": (rows, kind)})
    raw = read_gguf(path).tensors["w"]
    assert raw.shape == (300, 64)
    assert raw.type_id == kind
    out = np.full((302, 64), 7, np.float32)
    dequantize_into(raw, out[1:-1])
    np.testing.assert_array_equal(out[1:-1], gguf.dequantize(rows, kind))
    assert (out[[0, -1]] == 7).all()


def test_decoding_in_row_order_given_permutes_rows(tmp_path: Path) -> None:
    values = np.arange(32 * 5, dtype=np.float32).reshape(5, 32)
    path = write_gguf(tmp_path / "f.gguf", {}, {"w": values})
    out, order = np.empty((5, 32), np.float32), np.array([4, 0, 3, 1, 2])
    dequantize_into(read_gguf(path).tensors["w"], out, order)
    np.testing.assert_array_equal(out, values[order])


def test_demo_file_largest_tensors_decode_as_package_does(smollm2_file: GGUFFile) -> None:
    for name in ("token_embd.weight", "blk.29.ffn_down.weight", "blk.0.attn_q.weight"):
        raw = smollm2_file.tensors[name]
        out = np.empty(raw.shape, np.float32)
        dequantize_into(raw, out)
        rows = slice(-40, None)
        np.testing.assert_array_equal(out[rows], gguf.dequantize(raw.rows[rows], Kind(raw.type_id)))


def test_file_cut_anywhere_in_header_is_config_error(tiny_gguf: Path, tmp_path: Path) -> None:
    """A half-downloaded file must never surface as a struct or index error."""
    whole = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, 400), *range(400, len(whole) - 1, 997), len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf(cut)


def test_header_with_a_flipped_byte_is_read_or_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    whole, broken = tiny_gguf.read_bytes(), tmp_path / "broken.gguf"
    refused = 0
    for position in range(4, 700):
        broken.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            assert isinstance(read_gguf(broken), GGUFFile)
        except ConfigError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 a zip file, says its head", "is not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(64), "little-endian"),
    ],
)
def test_file_of_another_format_is_config_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_gguf(path)


def test_missing_file_and_folder_are_config_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_gguf(path)


def test_unknown_quantisation_type_is_config_error(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    name = b"token_embd.weight"
    type_at = whole.index(name) + len(name) + 4 + 16
    path = tmp_path / "type.gguf"
    path.write_bytes(whole[:type_at] + (250).to_bytes(4, "little") + whole[type_at + 4 :])
    with pytest.raises(ConfigError, match="type 250 is unknown"):
        read_gguf(path)


def test_required_metadata_absent_or_of_wrong_type_names_key(tiny_gguf: Path) -> None:
    file = read_gguf(tiny_gguf)
    assert file.require("llama.block_count", int) == 2
    with pytest.raises(ConfigError, match=r"'llama\.absent' is missing, expected int"):
        file.require("llama.absent", int)
    with pytest.raises(ConfigError, match=r"'llama\.block_count' is a int, expected str"):
        file.require("llama.block_count", str)
