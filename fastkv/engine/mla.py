"""A decoder with multi-head latent attention (MLA) in Paddle, float32: small, random, for trials without a download.

Owns the arithmetic of the layers, like `llama.LlamaModel`, and knows of no cache. What a token leaves behind in a
layer is one latent: kv_lora_rank values that every head's key and value are projected from, and qk_rope_head_dim
values of a rotary key that all heads share (decoupled rotary embedding). Source: DeepSeek-V2, arXiv 2405.04434.

`attend` gets queries and latents, both rotated already, and has two ways to answer:

    expanded   latent --expand--> keys, values of every head --> ordinary attention         (recomputation)
    absorbed   query --absorb--> query in latent space --> attention over latents --project_values--> (paged cache)

They are the same sum in another order: (W_k c) . q = c . (W_k^T q). Tests compare them, so neither is its own proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.utils.dlpack import from_dlpack

from fastkv.engine.recompute import causal_mask, rotate
from fastkv.errors import ConfigError, RequestError
from fastkv.ops import Rope


class LatentAttend(Protocol):
    """Attention of one step, given by whoever owns the latents of earlier tokens."""

    def __call__(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """Keep this step's latents, and attend.

        Args:
            layer: 0 to num_layers - 1, called once each, in order.
            q: float32 [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], contiguous, rotated.
            latent: float32 [num_tokens, kv_lora_rank + qk_rope_head_dim], contiguous, rotated.

        Returns:
            float32 [num_tokens, num_heads, v_head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class MlaGeometry:
    """Shapes and constants. The defaults make a tiny model: milliseconds a step, no two dimensions alike."""

    num_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    context_tokens: int
    qk_nope_head_dim: int = 12
    v_head_dim: int = 10
    d_model: int = 36
    ffn_dim: int = 64
    vocab_size: int = 97
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} is odd, rotary embedding turns pairs; use an even one"
            )

    @property
    def q_head_dim(self) -> int:
        """Width of one head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of what is cached of a token in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor  # [d_model]
    q: Tensor  # [num_heads * q_head_dim, d_model]
    kv_down: Tensor  # [latent_dim, d_model]
    kv_norm: Tensor  # [kv_lora_rank]
    key_up: Tensor  # [num_heads, qk_nope_head_dim, kv_lora_rank]
    value_up: Tensor  # [num_heads, v_head_dim, kv_lora_rank]
    attention_out: Tensor  # [d_model, num_heads * v_head_dim]
    ffn_norm: Tensor  # [d_model]
    gate_up: Tensor  # [2 * ffn_dim, d_model]
    ffn_down: Tensor  # [d_model, ffn_dim]


class MlaModel:
    """The decoder with weights that depend on nothing but geometry and seed.

    Args:
        geometry: its shapes.
        seed: of the weights.
    """

    def __init__(self, geometry: MlaGeometry, seed: int) -> None:
        self.geometry = g = geometry
        self.softmax_scale = 1.0 / math.sqrt(g.q_head_dim)
        self.rope = _rotary_table(g)
        rng = np.random.default_rng(seed)
        self._layers = tuple(_random_layer(g, rng) for _ in range(g.num_layers))
        self._embedding = _gaussian(rng, (g.vocab_size, g.d_model), 1.0)
        self._lm_head = _gaussian(rng, (g.vocab_size, g.d_model), 1.0)
        self._output_norm = _near_one(rng, g.d_model)

    @paddle.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: LatentAttend) -> Tensor:
        """Run all layers over a flat run of tokens.

        Args:
            token_ids: int64 [num_tokens], in [0, vocab_size).
            positions: int64 [num_tokens], each token's position in its own sequence.
            attend: called once a layer.

        Returns:
            float32 [num_tokens, d_model], before the output normalisation: pass the rows of interest to `logits`.

        Raises:
            RequestError: token_ids or positions out of range; nothing was run.
        """
        g, num_tokens = self.geometry, int(token_ids.shape[0])
        for name, values, limit in (
            ("token_ids", token_ids, g.vocab_size),
            ("positions", positions, g.context_tokens),
        ):
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= limit:
                raise RequestError(f"{name} reach from {low} to {high}; this model takes 0 to {limit - 1}")
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            attended = attend(index, self._queries(layer, normed, positions), self._latents(layer, normed, positions))
            attended = attended.reshape([num_tokens, g.num_heads * g.v_head_dim])
            hidden = hidden + paddle.matmul(attended, layer.attention_out, transpose_y=True)
            gate_up = paddle.matmul(self._rms_norm(hidden, layer.ffn_norm), layer.gate_up, transpose_y=True)
            hidden = hidden + paddle.matmul(F.swiglu(gate_up), layer.ffn_down, transpose_y=True)
        return hidden

    @paddle.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits, float32 [rows, vocab_size], of `hidden` [rows, d_model] as `forward` returns it."""
        return paddle.matmul(self._rms_norm(hidden, self._output_norm), self._lm_head, transpose_y=True)

    def absorb(self, layer: int, q: Tensor) -> Tensor:
        """Queries in latent space: [n, num_heads, q_head_dim] -> [n, num_heads, latent_dim]."""
        g = self.geometry
        nope, rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], axis=-1)
        return paddle.concat([_per_head(nope, self._layers[layer].key_up), rope], axis=-1)

    def project_values(self, layer: int, attended: Tensor) -> Tensor:
        """What absorbed attention summed, as values: [n, num_heads, kv_lora_rank] -> [n, num_heads, v_head_dim]."""
        return _per_head(attended, self._layers[layer].value_up.transpose([0, 2, 1]))

    def expand(self, layer: int, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Every head's keys [n, num_heads, q_head_dim] and values [n, num_heads, v_head_dim] of n latents."""
        g, weights = self.geometry, self._layers[layer]
        compressed, rope = latent.split([g.kv_lora_rank, g.qk_rope_head_dim], axis=-1)
        shared = rope.unsqueeze(1).expand([-1, g.num_heads, -1])
        stacked = compressed.unsqueeze(1).expand([-1, g.num_heads, -1])
        keys = paddle.concat([_per_head(stacked, weights.key_up.transpose([0, 2, 1])), shared], axis=-1)
        return keys, _per_head(stacked, weights.value_up.transpose([0, 2, 1]))

    def _queries(self, layer: _Layer, normed: Tensor, positions: Tensor) -> Tensor:
        g = self.geometry
        q = paddle.matmul(normed, layer.q, transpose_y=True).reshape([-1, g.num_heads, g.q_head_dim])
        nope, rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], axis=-1)
        return paddle.concat([nope, rotate(rope, self.rope, positions)], axis=-1)

    def _latents(self, layer: _Layer, normed: Tensor, positions: Tensor) -> Tensor:
        g = self.geometry
        down = paddle.matmul(normed, layer.kv_down, transpose_y=True)
        compressed, rope = down.split([g.kv_lora_rank, g.qk_rope_head_dim], axis=-1)
        rotated = rotate(rope.unsqueeze(1), self.rope, positions).squeeze(1)
        return paddle.concat([self._rms_norm(compressed, layer.kv_norm), rotated], axis=-1)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + self.geometry.rms_eps) * weight


def expanded_attend(model: MlaModel, num_tokens: int) -> LatentAttend:
    """Attention of one whole sequence of num_tokens without any cache and without absorption."""
    mask = causal_mask(num_tokens)

    def attend(layer: int, q: Tensor, latent: Tensor) -> Tensor:
        keys, values = model.expand(layer, latent)
        heads_q, heads_k, heads_v = (x.transpose([1, 0, 2]) for x in (q * model.softmax_scale, keys, values))
        weights = F.softmax(paddle.matmul(heads_q, heads_k, transpose_y=True) + mask, axis=-1)
        return paddle.matmul(weights, heads_v).transpose([1, 0, 2])

    return attend


@paddle.no_grad()
def recompute_logits(model: MlaModel, token_ids: Sequence[int], first_row: int = 0) -> npt.NDArray[np.float32]:
    """Logits of a sequence, everything computed again: float32 [len(token_ids) - first_row, vocab_size]."""
    positions = paddle.arange(len(token_ids), dtype="int64")
    tokens = paddle.to_tensor(list(token_ids), dtype="int64")
    hidden = model.forward(tokens, positions, expanded_attend(model, len(token_ids)))
    rows: npt.NDArray[np.float32] = model.logits(hidden[first_row:]).numpy()
    return rows


def recompute_greedy(model: MlaModel, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The next num_tokens greedy tokens, everything recomputed at each step."""
    sequence = list(token_ids)
    for _ in range(num_tokens):
        sequence.append(int(recompute_logits(model, sequence, len(sequence) - 1)[0].argmax()))
    return sequence[len(token_ids) :]


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own matrix: x [n, heads, a], weight [heads, a, b] -> [n, heads, b]."""
    return paddle.matmul(x.transpose([1, 0, 2]), weight).transpose([1, 0, 2])


def _rotary_table(g: MlaGeometry) -> Rope:
    half = g.qk_rope_head_dim // 2
    frequencies = g.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(g.context_tokens, dtype=np.float64)[:, None] * frequencies
    return Rope(from_dlpack(np.cos(angles).astype(np.float32)), from_dlpack(np.sin(angles).astype(np.float32)), "neox")


def _random_layer(g: MlaGeometry, rng: np.random.Generator) -> _Layer:
    def matrix(*shape: int, gain: float = 1.0) -> Tensor:
        return _gaussian(rng, shape, gain * shape[-1] ** -0.5)

    return _Layer(
        attention_norm=_near_one(rng, g.d_model),
        # Four times as large as its size asks for: attention picks tokens instead of averaging, so wrong keys show.
        q=matrix(g.num_heads * g.q_head_dim, g.d_model, gain=4.0),
        kv_down=matrix(g.latent_dim, g.d_model),
        kv_norm=_near_one(rng, g.kv_lora_rank),
        key_up=matrix(g.num_heads, g.qk_nope_head_dim, g.kv_lora_rank),
        value_up=matrix(g.num_heads, g.v_head_dim, g.kv_lora_rank),
        attention_out=matrix(g.d_model, g.num_heads * g.v_head_dim),
        ffn_norm=_near_one(rng, g.d_model),
        gate_up=matrix(2 * g.ffn_dim, g.d_model),
        ffn_down=matrix(g.d_model, g.ffn_dim),
    )


def _gaussian(rng: np.random.Generator, shape: tuple[int, ...], sigma: float) -> Tensor:
    return paddle.to_tensor(rng.standard_normal(shape, np.float32) * np.float32(sigma))


def _near_one(rng: np.random.Generator, size: int) -> Tensor:
    return paddle.to_tensor(1.0 + np.float32(0.1) * rng.standard_normal(size, np.float32))
