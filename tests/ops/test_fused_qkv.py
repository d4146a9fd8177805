"""append_attention_qkv: a fused projection gives what its three parts give, bit for bit, and what does not fit is
refused before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.ops_cases import (
    STORAGES,
    Twin,
    layer_of,
    make_batch,
    make_twin,
    model_rows,
    paddle_batch,
    to_array,
    to_paddle,
)
from helpers.ops_cases import fill_context as fill

from fastkv.core.dtype import STORAGE_DTYPES
from fastkv.errors import ConfigError
from fastkv.ops import AttentionBatch, LayerCache, Rope, append_attention, append_attention_qkv
from fastkv.ops import reference as ref

HEADS, KV_HEADS, DIM = 6, 2, 16


def ragged(rng: np.random.Generator) -> ref.Batch:
    """Prefill, decode, an empty request, and a padding token at the end."""
    batch = make_batch(rng, [5, 1, 0, 3], [0, 9, 4, 6], block_size=4, num_blocks=12)
    return replace(batch, slot_mapping=np.append(batch.slot_mapping, -1))


def parts_of(rng: np.random.Generator, tokens: int, model_dtype: str, value_dim: int) -> list[paddle.Tensor]:
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, value_dim))
    return [to_paddle(model_rows(rng, (tokens, *shape), model_dtype)) for shape in shapes]


def fused(parts: list[paddle.Tensor]) -> paddle.Tensor:
    rows = np.concatenate([to_array(x).reshape(len(x), -1) for x in parts], axis=1)
    return to_paddle(rows)


def twin_layers(twin: Twin) -> tuple[LayerCache, LayerCache]:
    return layer_of(twin.key, twin.value), layer_of(twin.key, twin.value)


def assert_same_caches(one: LayerCache, other: LayerCache) -> None:
    for a, b in zip(one.op_inputs[:4], other.op_inputs[:4], strict=True):
        if a is not None and b is not None:
            np.testing.assert_array_equal(to_array(a).view(np.uint8), to_array(b).view(np.uint8))


@pytest.mark.parametrize("value_dim", [DIM, 24])
@pytest.mark.parametrize(("quant_type", "model_dtype"), STORAGES)
def test_fused_projection_gives_the_bytes_of_its_parts(
    rng: np.random.Generator, isa: str, quant_type: str, model_dtype: str, value_dim: int
) -> None:
    batch = ragged(rng)
    twin = make_twin(rng, quant_type, model_dtype, blocks=12, dim=DIM, value_dim=value_dim)
    one, other = twin_layers(fill(rng, twin, batch))
    parts, step = parts_of(rng, len(batch.slot_mapping), model_dtype, value_dim), paddle_batch(batch)
    angles = rng.uniform(-3, 3, (32, DIM // 2)).astype(np.float32)
    options: dict[str, Any] = {
        "softmax_scale": 0.3,
        "rope": Rope(to_paddle(np.cos(angles)), to_paddle(np.sin(angles))),
        "window": 7,
        "sinks": to_paddle(rng.standard_normal(HEADS).astype(np.float32)),
    }
    expected = append_attention(*parts, one, step, **options)
    result = append_attention_qkv(fused(parts), other, step, **options)
    assert result.shape == [len(batch.slot_mapping), HEADS * value_dim]
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(to_array(result), to_array(expected.flatten(1)))
    assert_same_caches(one, other)


def test_fused_prompt_of_many_tiles_gives_the_bytes_of_its_parts(rng: np.random.Generator) -> None:
    """Panels and several threads, not only the few rows of a decode step."""
    batch = make_batch(rng, [300, 80], [40, 700], block_size=16, num_blocks=80)
    twin = make_twin(rng, "int8", blocks=80, block_size=16, dim=DIM)
    one, other = twin_layers(fill(rng, twin, batch))
    parts, step = parts_of(rng, 380, "float32", DIM), paddle_batch(batch)
    expected = append_attention(*parts, one, step, softmax_scale=0.25)
    result = append_attention_qkv(fused(parts), other, step, softmax_scale=0.25)
    np.testing.assert_array_equal(result.numpy(), expected.flatten(1).numpy())
    assert_same_caches(one, other)


def test_out_receives_the_fused_result_and_is_returned(rng: np.random.Generator) -> None:
    batch = ragged(rng)
    one, other = twin_layers(fill(rng, make_twin(rng, blocks=12, dim=DIM), batch))
    qkv, step = fused(parts_of(rng, len(batch.slot_mapping), "float32", DIM)), paddle_batch(batch)
    expected = append_attention_qkv(qkv, one, step, softmax_scale=0.3)
    out = paddle.full([len(batch.slot_mapping), HEADS * DIM], 7.0)
    assert append_attention_qkv(qkv, other, step, softmax_scale=0.3, out=out) is out
    np.testing.assert_array_equal(out.numpy(), expected.numpy())


WIDTH = (HEADS + 2 * KV_HEADS) * DIM
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no queries": ({"qkv": [4, 4 * DIM]}, r"n \* 32 \+ 64 elements, n query heads .* is float32 \[4, 64\]"),
    "part of a head": ({"qkv": [4, WIDTH + 8]}, r"qkv must have rows of n \* 32 \+ 64 elements"),
    "heads that share nothing": ({"qkv": [4, WIDTH + DIM]}, r"qkv must have rows of n \* 32 \+ 64 elements"),
    "heads as a dimension": (
        {"qkv": [4, HEADS + 2 * KV_HEADS, DIM]},
        r"qkv must be \[num_tokens, num_heads \* head_dim",
    ),
    "other tokens": ({"qkv": [3, WIDTH]}, r"the 4 tokens of slot_mapping, but is float32 \[3, 160\]"),
    "another dtype": ({"dtype": "float64"}, "qkv must be float32, float16 or bfloat16"),
    "not the cache's dtype": ({"dtype": "bfloat16"}, "none stores bfloat16, but key_cache is float32"),
    "out of another shape": ({"out": [4, HEADS, DIM]}, r"out must be float32 \[4, 96\], but is float32 \[4, 6, 16\]"),
    "sinks of another size": ({"sinks": [2]}, r"sinks must be \[6\]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_append_attention_qkv_refuses_and_writes_nothing(rng: np.random.Generator, case: str) -> None:
    changes, message = REFUSALS[case]
    layer, batch = make_twin(rng).layer, four_tokens(rng)
    before = to_array(layer.key).copy()
    qkv = paddle.zeros(changes.get("qkv", [4, WIDTH]), changes.get("dtype", "float32"))
    options = {name: paddle.zeros(changes[name]) for name in ("out", "sinks") if name in changes}
    with pytest.raises(ConfigError, match=message):
        append_attention_qkv(qkv, layer, batch, softmax_scale=1.0, **options)
    np.testing.assert_array_equal(to_array(layer.key), before)


def test_append_attention_qkv_refuses_memory_that_it_cannot_use(rng: np.random.Generator) -> None:
    layer, batch = make_twin(rng).layer, four_tokens(rng)
    strided = paddle.zeros([WIDTH, 4]).transpose([1, 0])
    with pytest.raises(ConfigError, match=r"qkv is float32 \[4, 160\] with strides \[1, 4\], not contiguous"):
        append_attention_qkv(strided, layer, batch, softmax_scale=1.0)
    with pytest.raises(ConfigError, match="qkv must be a Paddle tensor, but is a ndarray"):
        append_attention_qkv(np.zeros((4, WIDTH), np.float32), layer, batch, softmax_scale=1.0)
    memory = paddle.zeros([4 * WIDTH])
    qkv, out = memory.view([4, WIDTH]), memory[: 4 * HEADS * DIM].view([4, HEADS * DIM])
    with pytest.raises(ConfigError, match="out is the memory of q, k or v"):
        append_attention_qkv(qkv, layer, batch, softmax_scale=1.0, out=out)
    latent = LayerCache(STORAGE_DTYPES[None], paddle.zeros([8, 1, 4, 16]))
    with pytest.raises(ConfigError, match="needs a key and a value cache, but got a latent one"):
        append_attention_qkv(qkv, latent, batch, softmax_scale=1.0)


def four_tokens(rng: np.random.Generator) -> AttentionBatch:
    return paddle_batch(make_batch(rng, [1, 3], [5, 0], block_size=4, num_blocks=8))
