"""The MLA decoder without any cache: against float64 NumPy, and its two ways to attend against each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from paddle import Tensor

from fastkv.core.spec import Role
from fastkv.engine.calibration import RangeCollector, collect_ranges
from fastkv.engine.mla import MlaGeometry, MlaModel, expanded_attend, recompute_greedy, recompute_logits
from fastkv.errors import ConfigError, RequestError

GEOMETRY = MlaGeometry(num_layers=2, num_heads=3, kv_lora_rank=16, qk_rope_head_dim=8, context_tokens=64)
TOKENS = np.random.default_rng(2).integers(0, GEOMETRY.vocab_size, 21).tolist()
Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def model() -> MlaModel:
    return MlaModel(GEOMETRY, seed=4)


def numpy_logits(model: MlaModel, tokens: list[int]) -> Array:
    """The whole decoder again, in float64, one head at a time, rotary embedding as complex numbers."""
    g = model.geometry

    def norm(x: Array, weight: Tensor) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + g.rms_eps) * weight.numpy().astype(np.float64)

    def turn(x: Array) -> Array:
        half = g.qk_rope_head_dim // 2
        angle = np.arange(len(x))[:, None] * g.rope_theta ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    hidden = model._embedding.numpy().astype(np.float64)[tokens]
    for layer in model._layers:
        x = norm(hidden, layer.attention_norm)
        down = x @ layer.kv_down.numpy().T
        compressed, shared_key = norm(down[:, : g.kv_lora_rank], layer.kv_norm), turn(down[:, g.kv_lora_rank :])
        queries = (x @ layer.q.numpy().T).reshape(len(x), g.num_heads, g.q_head_dim)
        outs = []
        for head in range(g.num_heads):
            keys = np.concatenate([compressed @ layer.key_up.numpy()[head].T, shared_key], axis=-1)
            nope, rope = queries[:, head, : g.qk_nope_head_dim], turn(queries[:, head, g.qk_nope_head_dim :])
            scores = np.concatenate([nope, rope], axis=-1) @ keys.T / np.sqrt(g.q_head_dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            outs.append(weights @ compressed @ layer.value_up.numpy()[head].T)
        hidden = hidden + np.concatenate(outs, axis=-1) @ layer.attention_out.numpy().T
        gate, up = np.split(norm(hidden, layer.ffn_norm) @ layer.gate_up.numpy().T, 2, axis=-1)
        hidden = hidden + gate / (1 + np.exp(-gate)) * up @ layer.ffn_down.numpy().T
    return norm(hidden, model._output_norm) @ model._lm_head.numpy().T


def test_mla_recompute_matches_numpy_in_double_precision(model: MlaModel) -> None:
    np.testing.assert_allclose(recompute_logits(model, TOKENS), numpy_logits(model, TOKENS), rtol=0, atol=2e-4)


def test_mla_absorbed_attention_equals_expanded_attention(model: MlaModel) -> None:
    """(W_k c) . q = c . (W_k^T q), layer by layer, on latents and queries of a real run."""
    n, expanded = len(TOKENS), expanded_attend(model, len(TOKENS))

    def both(layer: int, q: Tensor, latent: Tensor) -> Tensor:
        want = expanded(layer, q, latent)
        scores = paddle.einsum("nhd,md->hnm", model.absorb(layer, q), latent) * model.softmax_scale
        weights = paddle.nn.functional.softmax(scores + paddle.triu(paddle.full([n, n], -np.inf), 1), axis=-1)
        summed = paddle.einsum("hnm,mr->nhr", weights, latent[:, : GEOMETRY.kv_lora_rank])
        np.testing.assert_allclose(model.project_values(layer, summed).numpy(), want.numpy(), rtol=0, atol=2e-5)
        return want

    seen = model.forward(paddle.to_tensor(TOKENS), paddle.arange(n), both)
    assert list(seen.shape) == [n, GEOMETRY.d_model]


def test_mla_logits_depend_on_order_and_on_nothing_later(model: MlaModel) -> None:
    full = recompute_logits(model, TOKENS)
    np.testing.assert_allclose(recompute_logits(model, TOKENS[:9]), full[:9], rtol=0, atol=2e-5)
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert np.abs(recompute_logits(model, swapped)[-1] - full[-1]).max() > 1e-3


def test_mla_weights_follow_the_seed() -> None:
    same, other = MlaModel(GEOMETRY, seed=4), MlaModel(GEOMETRY, seed=5)
    assert recompute_greedy(same, TOKENS, 6) == recompute_greedy(MlaModel(GEOMETRY, seed=4), TOKENS, 6)
    assert np.abs(recompute_logits(same, TOKENS) - recompute_logits(other, TOKENS)).max() > 0.1


def test_mla_calibration_covers_every_channel_of_the_latents(model: MlaModel) -> None:
    seen: dict[int, npt.NDArray[np.float32]] = {}
    expanded = expanded_attend(model, len(TOKENS))

    def watch(layer: int, q: Tensor, latent: Tensor) -> Tensor:
        seen[layer] = latent.numpy()
        return expanded(layer, q, latent)

    model.forward(paddle.to_tensor(TOKENS), paddle.arange(len(TOKENS)), watch)
    collector = RangeCollector()
    assert collect_ranges(model, TOKENS, collector) == len(TOKENS)
    ranges = collector.ranges()
    assert {layer: set(roles) for layer, roles in ranges.items()} == {0: {Role.LATENT}, 1: {Role.LATENT}}
    for layer, latent in seen.items():
        entry = ranges[layer][Role.LATENT]
        assert entry.minimum.shape == entry.maximum.shape == (1, GEOMETRY.latent_dim)
        np.testing.assert_array_equal(entry.minimum[0], latent.min(0))
        np.testing.assert_array_equal(entry.maximum[0], latent.max(0))


def test_mla_out_of_range_input_is_refused(model: MlaModel) -> None:
    with pytest.raises(RequestError, match=r"token_ids reach from 3 to 97.*0 to 96"):
        recompute_logits(model, [3, GEOMETRY.vocab_size])
    with pytest.raises(RequestError, match=r"positions reach from 0 to 64.*0 to 63"):
        recompute_logits(model, [1] * 65)
    with pytest.raises(ConfigError, match="qk_rope_head_dim 7 is odd"):
        MlaGeometry(num_layers=1, num_heads=1, kv_lora_rank=4, qk_rope_head_dim=7, context_tokens=8)
