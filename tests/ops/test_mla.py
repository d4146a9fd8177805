"""mla_append_attention against its reference: absorbed form over a latent cache."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ops_cases import (
    MODEL_DTYPES,
    assert_close,
    cache_tensor,
    context_slots,
    layer_of,
    make_batch,
    model_rows,
    paddle_batch,
    to_array,
    to_paddle,
)

from fastkv.errors import ConfigError
from fastkv.ops import mla_append_attention
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import to_float32


def run_both(
    rng: np.random.Generator, quant_type: str, dtype: str, rank: int, rope_dim: int, heads: int, lens: tuple
) -> None:
    batch = make_batch(rng, *lens, block_size=4, num_blocks=60)
    cache = cache_tensor(rng, quant_type, dtype, (60, 1, 4, rank + rope_dim), per_head=True)
    slots = context_slots(batch, 4)
    cache.write(slots, to_float32(model_rows(rng, (len(slots), 1, rank + rope_dim), dtype), dtype))
    layer = layer_of(cache, None)
    tokens = len(batch.slot_mapping)
    q = model_rows(rng, (tokens, heads, rank + rope_dim), dtype)
    latent = model_rows(rng, (tokens, rank + rope_dim), dtype)
    scale = (rank + rope_dim) ** -0.5
    out = mla_append_attention(
        to_paddle(q), to_paddle(latent), layer, paddle_batch(batch), kv_lora_rank=rank, softmax_scale=scale
    )
    expected = ref.mla_append_attention(q, latent, cache, batch, kv_lora_rank=rank, softmax_scale=scale)
    np.testing.assert_array_equal(to_array(layer.key), cache.data)
    assert list(out.shape) == [tokens, heads, rank]
    assert np.isfinite(to_float32(expected, dtype)).all()
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("quant_type", ["none", "float8_e4m3fn"])
def test_mla_ragged_batch_matches_reference(rng: np.random.Generator, isa: str, quant_type: str, dtype: str) -> None:
    run_both(rng, quant_type, dtype, 32, 8, 5, ([1, 6, 0, 3], [9, 0, 2, 70]))


@pytest.mark.parametrize(("rank", "rope_dim", "heads"), [(512, 64, 16), (512, 64, 70), (20, 6, 3), (8, 0, 1)])
def test_mla_geometry_matches_reference(rng: np.random.Generator, rank: int, rope_dim: int, heads: int) -> None:
    """DeepSeek's 512 + 64; more heads than one tile of rows; lengths that fill no register; no rotary part."""
    run_both(rng, "none", "float32", rank, rope_dim, heads, ([2, 1], [0, 20]))


def test_mla_refuses_what_is_no_latent_cache(rng: np.random.Generator) -> None:
    batch = paddle_batch(make_batch(rng, [1], [0], block_size=4, num_blocks=4))
    latent = cache_tensor(rng, "none", "float32", (4, 1, 4, 16))
    row, q = to_paddle(np.zeros((1, 16), np.float32)), to_paddle(np.zeros((1, 2, 16), np.float32))
    with pytest.raises(ConfigError, match="needs a latent cache, but got keys and values"):
        mla_append_attention(q, row, layer_of(latent, latent), batch, kv_lora_rank=8, softmax_scale=1.0)
    two_heads = cache_tensor(rng, "none", "float32", (4, 2, 4, 16))
    with pytest.raises(ConfigError, match=r"latent_cache must be \[blocks, 1, block_size, dim\].*\[4, 2, 4, 16\]"):
        layer_of(two_heads, None)
    for quant_type in ("int8", "int4_zp", "block_wise_fp8"):
        with pytest.raises(ConfigError, match=f"{quant_type} is not supported with mla"):
            layer_of(cache_tensor(rng, quant_type, "float32", (4, 1, 4, 16)), None)
    with pytest.raises(ConfigError, match=r"latent_cache|kv_lora_rank is 17.*row length 16"):
        mla_append_attention(q, row, layer_of(latent, None), batch, kv_lora_rank=17, softmax_scale=1.0)
    per_channel = cache_tensor(rng, "float8_e4m3fn", "float32", (4, 1, 4, 16))
    with pytest.raises(ConfigError, match=r"needs key_scale, float32 \[1\]"):
        layer_of(per_channel, None)
