"""The model against an independent NumPy one, and the demo model against a known answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from helpers.tiny_gguf import interleave, model_tensors

from fastkv.engine import recompute
from fastkv.engine.llama import LlamaModel, load_model, random_geometry, random_weights
from fastkv.engine.tokenizer import Tokenizer
from fastkv.errors import ConfigError, RequestError

PROMPT = [5, 17, 3, 3, 90, 41, 8]


def _numpy_logits(tensors: dict[str, np.ndarray], g, ids: list[int]) -> np.ndarray:
    """A llama in float64 that loops over heads and tokens, on unfused weights in GGUF's own row order."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + g.rms_eps) * tensors[name]

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        frequencies = g.rope_theta ** (-np.arange(0, g.head_dim, 2) / g.head_dim)
        turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * frequencies)
        return np.stack([turned.real, turned.imag], -1).reshape(-1)

    x = tensors["token_embd.weight"][ids].astype(np.float64)
    for layer in range(g.num_layers):
        weight = {name: tensors[f"blk.{layer}.{name}.weight"].astype(np.float64) for name in (
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}  # fmt: skip
        y = norm(x, f"blk.{layer}.attn_norm.weight")
        q, k, v = ((y @ weight[name].T).reshape(len(ids), -1, g.head_dim) for name in ("attn_q", "attn_k", "attn_v"))
        out = np.zeros((len(ids), g.num_heads, g.head_dim))
        for t in range(len(ids)):
            for h in range(g.num_heads):
                kv = h * g.kv_heads // g.num_heads
                query = rotate(q[t, h], t)
                scores = np.array([query @ rotate(k[s, kv], s) for s in range(t + 1)]) / np.sqrt(g.head_dim)
                p = np.exp(scores - scores.max())
                out[t, h] = (p / p.sum()) @ v[: t + 1, kv]
        x = x + out.reshape(len(ids), -1) @ weight["attn_output"].T
        y = norm(x, f"blk.{layer}.ffn_norm.weight")
        gate, up = y @ weight["ffn_gate"].T, y @ weight["ffn_up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight["ffn_down"].T
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    return norm(x, "output_norm.weight") @ head.T.astype(np.float64)


@pytest.mark.parametrize(
    "geometry",
    [
        random_geometry(),
        random_geometry(tied_embedding=True, num_heads=3, kv_heads=1, head_dim=16, num_layers=3),
        random_geometry(num_heads=2, kv_heads=2, head_dim=64),
    ],
    ids=["gqa", "mqa-tied", "mha"],
)
def test_logits_of_tiny_model_equal_independent_numpy_model(geometry) -> None:
    """Tolerance 2e-4 of logits with a standard deviation near 6: float32 against float64."""
    weights = random_weights(geometry, seed=1)
    found = recompute.logits(LlamaModel(weights, geometry), PROMPT)
    expected = _numpy_logits(model_tensors(weights, geometry), geometry, PROMPT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_model_from_file_equals_model_from_its_weights(tiny_gguf: Path) -> None:
    """Through the file: names, permutation, fusing and geometry."""
    geometry = random_geometry(vocab_size=261)
    direct = LlamaModel(random_weights(geometry, seed=7), geometry)
    np.testing.assert_allclose(
        recompute.logits(load_model(str(tiny_gguf)), PROMPT), recompute.logits(direct, PROMPT), rtol=0, atol=1e-5
    )


def test_demo_model_greedy_completes_capital_of_france(smollm2: LlamaModel, smollm2_tokenizer: Tokenizer) -> None:
    prompt = smollm2_tokenizer.encode("The capital of France is")
    output = recompute.greedy_generate(smollm2, prompt, 4)
    assert smollm2_tokenizer.decode(output).startswith(" Paris.")
    assert recompute.teacher_forced(smollm2, prompt, output)[0] == output


def test_generation_is_deterministic_and_seeds_give_other_models(tiny_model: LlamaModel) -> None:
    again = LlamaModel(random_weights(tiny_model.geometry, seed=7), tiny_model.geometry)
    other = LlamaModel(random_weights(tiny_model.geometry, seed=8), tiny_model.geometry)
    output = recompute.greedy_generate(tiny_model, PROMPT, 12)
    assert len(set(output)) > 4
    assert recompute.greedy_generate(again, PROMPT, 12) == output
    assert recompute.greedy_generate(other, PROMPT, 12) != output


def test_generation_ends_after_a_stop_token(tiny_model: LlamaModel) -> None:
    output = recompute.greedy_generate(tiny_model, PROMPT, 12)
    stop = output[5]
    assert recompute.greedy_generate(tiny_model, PROMPT, 12, {stop}) == output[: output.index(stop) + 1]


def test_teacher_forcing_finds_first_wrong_token(tiny_model: LlamaModel) -> None:
    output = recompute.greedy_generate(tiny_model, PROMPT, 8)
    tokens, rows = recompute.teacher_forced(tiny_model, PROMPT, output)
    assert tokens == output
    assert rows.shape == (8, 97)
    wrong = [*output[:3], (output[3] + 1) % 97, *output[4:]]
    tokens, _ = recompute.teacher_forced(tiny_model, PROMPT, wrong)
    assert [a == b for a, b in zip(tokens, wrong, strict=True)].index(False) == 3


def test_logits_from_first_row_are_the_last_of_all(tiny_model: LlamaModel) -> None:
    whole = recompute.logits(tiny_model, PROMPT)
    np.testing.assert_allclose(recompute.logits(tiny_model, PROMPT, 4), whole[4:], rtol=0, atol=1e-5)


def test_attend_sees_contiguous_unrotated_rows_once_a_layer_in_order(tiny_model: LlamaModel) -> None:
    """Custom ops take pointers: a non-contiguous slice would be read wrongly."""
    g = tiny_model.geometry
    seen = []

    def attend(layer, qkv):
        assert qkv.is_contiguous()
        assert qkv.dtype == paddle.float32
        q, k, v = tiny_model.split_heads(qkv)
        assert (q.shape, k.shape, v.shape) == ([3, g.num_heads, g.head_dim], [3, g.kv_heads, g.head_dim], k.shape)
        np.testing.assert_array_equal(paddle.concat([x.flatten(1) for x in (q, k, v)], 1).numpy(), qkv.numpy())
        # The same token at other positions: equal rows as long as nothing is rotated.
        np.testing.assert_allclose(k.numpy()[0], k.numpy()[2], rtol=0, atol=1e-6)
        seen.append(layer)
        return paddle.zeros([3, g.q_dim])

    positions = paddle.to_tensor([0, 5, 9], dtype="int64")
    hidden = tiny_model.forward(paddle.to_tensor([4, 9, 4], dtype="int64"), positions, attend)
    assert hidden.shape == [3, g.d_model]
    assert hidden.stop_gradient
    assert seen == list(range(g.num_layers))


def test_flat_batch_of_two_sequences_equals_each_alone(tiny_model: LlamaModel) -> None:
    first, second = PROMPT, [61, 2, 33]
    split = len(first)
    positions = paddle.to_tensor([*range(split), *range(len(second))], dtype="int64")

    def attend(layer, qkv):
        q, k, v = tiny_model.split_heads(qkv)
        q, k = (recompute.rotate(x, tiny_model.rope, positions) for x in (q, k))
        parts = [
            recompute.causal_attention(q[s], k[s], v[s], tiny_model.softmax_scale, recompute.causal_mask(n))
            for s, n in ((slice(0, split), split), (slice(split, None), len(second)))
        ]
        return paddle.concat(parts).flatten(1)

    ids = paddle.to_tensor(first + second, dtype="int64")
    batched = tiny_model.logits(tiny_model.forward(ids, positions, attend)).numpy()
    alone = np.concatenate([recompute.logits(tiny_model, first), recompute.logits(tiny_model, second)])
    np.testing.assert_allclose(batched, alone, rtol=0, atol=2e-5)


def test_rotary_table_holds_angles_of_every_position(tiny_model: LlamaModel) -> None:
    g, rope = tiny_model.geometry, tiny_model.rope
    assert rope.cos.shape == rope.sin.shape == [g.context_tokens, g.head_dim // 2]
    assert rope.style == "neox"
    position, i = 500, 3
    angle = position * g.rope_theta ** (-2 * i / g.head_dim)
    assert float(rope.cos[position, i]) == pytest.approx(np.cos(angle), abs=1e-6)
    assert float(rope.sin[position, i]) == pytest.approx(np.sin(angle), abs=1e-6)


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        ([97], [0], "token_ids reach from 97 to 97; this model takes 0 to 96"),
        ([3, -1], [0, 1], "token_ids reach from -1 to 3"),
        ([3], [512], "positions reach from 512 to 512; this model takes 0 to 511"),
        ([3], [-1], "positions reach from -1"),
        ([3, 4], [0], "of one length"),
        ([], [], "not empty"),
    ],
)
def test_tokens_or_positions_out_of_range_are_refused_before_any_layer(
    tiny_model: LlamaModel, ids: list[int], positions: list[int], message: str
) -> None:
    def attend(layer, qkv):
        raise AssertionError("no layer may run")

    with pytest.raises(RequestError, match=message):
        tiny_model.forward(paddle.to_tensor(ids, dtype="int64"), paddle.to_tensor(positions, dtype="int64"), attend)


def test_weights_of_another_shape_are_config_errors(tiny_model: LlamaModel) -> None:
    weights = random_weights(tiny_model.geometry, seed=7)
    with pytest.raises(ConfigError, match="weights hold 2 layers, the geometry says 3"):
        LlamaModel(weights, replace(tiny_model.geometry, num_layers=3))
    with pytest.raises(ConfigError, match=r"weight layer 0 qkv is float32 \[64, 32\]"):
        LlamaModel(weights, replace(tiny_model.geometry, kv_heads=4))
    with pytest.raises(ConfigError, match="weight output_norm is float64"):
        LlamaModel(replace(weights, output_norm=weights.output_norm.astype(np.float64)), tiny_model.geometry)


def test_weights_are_shared_with_the_arrays_given() -> None:
    """Half a gigabyte must not exist twice: a change of the array shows in the model."""
    geometry = random_geometry()
    weights = random_weights(geometry, seed=7)
    model = LlamaModel(weights, geometry)
    before = recompute.logits(model, PROMPT)
    weights.lm_head[...] *= 2
    np.testing.assert_allclose(recompute.logits(model, PROMPT), 2 * before, rtol=1e-6)


@pytest.mark.parametrize("field", ["num_layers", "kv_heads", "vocab_size", "context_tokens"])
def test_geometry_without_extent_is_config_error(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(random_geometry(), **{field: 0})


def test_geometry_with_odd_head_dim_is_config_error() -> None:
    with pytest.raises(ConfigError, match="head_dim is 7"):
        random_geometry(head_dim=7)


def test_interleave_helper_swaps_halves_for_neighbours() -> None:
    """The other tests lean on it: row 0, 1 of a head in the file are row 0 of each half."""
    rows = np.arange(8.0)[:, None]
    assert interleave(rows, 2).reshape(-1).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
