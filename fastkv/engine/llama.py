"""A Llama-family decoder in Paddle, float32.

Owns the arithmetic of the layers and nothing else: the model knows of no cache, no block and no request. Whoever runs
a step (the engine's worker, or `recompute` without any cache) passes `attend`, which gets each layer's queries, keys
and values *before* rotary embedding, as the fused projection leaves them, and rotates them by `LlamaModel.rope`.

What always holds: tokens are independent of each other outside `attend`, so one flat run of tokens can mix requests,
prefill chunks and decode. Weights are shared with the NumPy arrays given, never copied, never written.

Why plain operations: Paddle's fused normalisations die with SIGILL on CPUs without AVX-512, and bf16 has no matrix
multiplication on CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.utils.dlpack import from_dlpack

from fastkv.engine.gguf_file import FloatArray
from fastkv.engine.gguf_weights import (
    ModelGeometry,
    ModelWeights,
    ProgressCallback,
    empty_weights,
    load_weights,
    open_model,
    read_geometry,
)
from fastkv.errors import ConfigError, RequestError
from fastkv.ops import Rope


class Attend(Protocol):
    """Attention of one step, given by whoever owns the keys and values of earlier tokens."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Keep this step's keys and values, and attend.

        Args:
            layer: 0 to num_layers - 1, called once each, in order.
            qkv: float32 [num_tokens, (num_heads + 2 * kv_heads) * head_dim], contiguous: of each token its queries, its
                keys, its values, not rotated; `LlamaModel.split_heads` takes them apart.

        Returns:
            float32 [num_tokens, num_heads * head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    ffn_down: Tensor


class LlamaModel:
    """The decoder over given weights.

    Args:
        weights: float32 arrays; they stay referenced and must not change.
        geometry: what the weights were made for.

    Raises:
        ConfigError: the shape of a weight does not fit the geometry.
    """

    def __init__(self, weights: ModelWeights, geometry: ModelGeometry) -> None:
        _check_weights(weights, geometry)
        self.geometry = geometry
        self.rope = rotary_table(geometry)
        self.softmax_scale = 1.0 / math.sqrt(geometry.head_dim)
        self._embedding = from_dlpack(weights.embedding)
        self._lm_head = self._embedding if geometry.tied_embedding else from_dlpack(weights.lm_head)
        self._output_norm = from_dlpack(weights.output_norm)
        self._layers = tuple(
            _Layer(
                attention_norm=from_dlpack(layer.attention_norm),
                qkv=from_dlpack(layer.qkv),
                attention_out=from_dlpack(layer.attention_out),
                ffn_norm=from_dlpack(layer.ffn_norm),
                gate_up=from_dlpack(layer.gate_up),
                ffn_down=from_dlpack(layer.ffn_down),
            )
            for layer in weights.layers
        )

    @paddle.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers over a flat run of tokens.

        Args:
            token_ids: int64 [num_tokens], in [0, vocab_size).
            positions: int64 [num_tokens], each token's position in its own sequence. The model only checks them
                (the rotary table ends at context_tokens); rotating is up to `attend`.
            attend: called once a layer.

        Returns:
            float32 [num_tokens, d_model], before the output normalisation: pass the rows of interest to `logits`.

        Raises:
            RequestError: token_ids or positions out of range or of different lengths; nothing was run.
        """
        self._check_tokens(token_ids, positions)
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = paddle.matmul(self._rms_norm(hidden, layer.attention_norm), layer.qkv, transpose_y=True)
            hidden = hidden + paddle.matmul(attend(index, qkv), layer.attention_out, transpose_y=True)
            gate_up = paddle.matmul(self._rms_norm(hidden, layer.ffn_norm), layer.gate_up, transpose_y=True)
            hidden = hidden + paddle.matmul(F.swiglu(gate_up), layer.ffn_down, transpose_y=True)
        return hidden

    def split_heads(self, qkv: Tensor) -> list[Tensor]:
        """What `Attend` gets, copied: q [num_tokens, num_heads, head_dim], k, v [num_tokens, kv_heads, head_dim]."""
        g = self.geometry
        heads = qkv.reshape([qkv.shape[0], g.num_heads + 2 * g.kv_heads, g.head_dim])
        split: list[Tensor] = heads.split([g.num_heads, g.kv_heads, g.kv_heads], axis=1)
        return split

    @paddle.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32 [rows, vocab_size], of `hidden` [rows, d_model] as `forward` returns it.

        Cost: reads the whole output matrix (113 MB for the demo model) once a call: ask for the last row of each
        request only, and for all requests in one call.
        """
        return paddle.matmul(self._rms_norm(hidden, self._output_norm), self._lm_head, transpose_y=True)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + self.geometry.rms_eps) * weight

    def _check_tokens(self, token_ids: Tensor, positions: Tensor) -> None:
        # An id out of range would read foreign memory in the gather, a position past the table in the rotation.
        if token_ids.ndim != 1 or positions.shape != token_ids.shape or token_ids.shape[0] == 0:
            raise RequestError(
                f"token_ids {token_ids.shape} and positions {positions.shape} must be one-dimensional, not empty and "
                "of one length"
            )
        for name, values, limit in (
            ("token_ids", token_ids, self.geometry.vocab_size),
            ("positions", positions, self.geometry.context_tokens),
        ):
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= limit:
                raise RequestError(f"{name} reach from {low} to {high}; this model takes 0 to {limit - 1}")


def rotary_table(geometry: ModelGeometry) -> Rope:
    """cos and sin of position * theta^(-2i / head_dim), float32 [context_tokens, head_dim / 2], style neox.

    Computed in float64, so that angles of far positions keep their precision.
    """
    half = geometry.head_dim // 2
    frequencies = geometry.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(geometry.context_tokens, dtype=np.float64)[:, None] * frequencies
    return Rope(from_dlpack(np.cos(angles).astype(np.float32)), from_dlpack(np.sin(angles).astype(np.float32)), "neox")


def load_model(model: str, progress: ProgressCallback | None = None) -> LlamaModel:
    """Find, read and wrap a GGUF model; `model` as for `gguf_weights.find_model`. Raises ConfigError."""
    file = open_model(model)
    geometry = read_geometry(file)
    return LlamaModel(load_weights(file, geometry, progress), geometry)


def random_geometry(
    *,
    num_layers: int = 2,
    d_model: int = 32,
    num_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    ffn_dim: int = 64,
    vocab_size: int = 97,
    context_tokens: int = 512,
    tied_embedding: bool = False,
) -> ModelGeometry:
    """A tiny model's geometry for tests: milliseconds a step, every dimension different from the others."""
    return ModelGeometry(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        rope_theta=10000.0,
        context_tokens=context_tokens,
        rms_eps=1e-5,
        tied_embedding=tied_embedding,
    )


def random_weights(geometry: ModelGeometry, seed: int) -> ModelWeights:
    """Weights that depend on nothing but geometry and seed, scaled so that activations keep their size."""
    rng = np.random.default_rng(seed)
    weights = empty_weights(geometry)
    for layer in weights.layers:
        for norm in (layer.attention_norm, layer.ffn_norm):
            norm[...] = 1.0 + 0.1 * rng.standard_normal(norm.shape, np.float32)
        for matrix in (layer.qkv, layer.attention_out, layer.gate_up, layer.ffn_down):
            rng.standard_normal(dtype=np.float32, out=matrix)
            matrix *= matrix.shape[1] ** -0.5
        # Queries four times as large: attention picks tokens instead of averaging, so wrong keys show.
        layer.qkv[: geometry.q_dim] *= 4.0
    weights.output_norm[...] = 1.0 + 0.1 * rng.standard_normal(weights.output_norm.shape, np.float32)
    rng.standard_normal(dtype=np.float32, out=weights.embedding)
    if not geometry.tied_embedding:
        rng.standard_normal(dtype=np.float32, out=weights.lm_head)
    return weights


def _check_weights(weights: ModelWeights, geometry: ModelGeometry) -> None:
    g = geometry
    if len(weights.layers) != g.num_layers:
        raise ConfigError(f"weights hold {len(weights.layers)} layers, the geometry says {g.num_layers}")
    expected = {
        "attention_norm": (g.d_model,),
        "qkv": (g.q_dim + 2 * g.kv_dim, g.d_model),
        "attention_out": (g.d_model, g.q_dim),
        "ffn_norm": (g.d_model,),
        "gate_up": (2 * g.ffn_dim, g.d_model),
        "ffn_down": (g.d_model, g.ffn_dim),
    }
    found: list[tuple[str, FloatArray, tuple[int, ...]]] = [
        ("embedding", weights.embedding, (g.vocab_size, g.d_model)),
        ("lm_head", weights.lm_head, (g.vocab_size, g.d_model)),
        ("output_norm", weights.output_norm, (g.d_model,)),
    ]
    for index, layer in enumerate(weights.layers):
        found += [(f"layer {index} {name}", getattr(layer, name), shape) for name, shape in expected.items()]
    for name, array, shape in found:
        if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ConfigError(
                f"weight {name} is {array.dtype} {list(array.shape)}, the geometry wants contiguous float32 "
                f"{list(shape)}"
            )
