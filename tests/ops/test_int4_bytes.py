"""Decode of int4_zp in models of bfloat16, whose kernels round the query and the weights to bytes.

What that costs must be small beside what four bits cost, whatever the weights look like, and sums of 16 bits must hold
what they are given at worst. Other instruction sets do the same work in floats, so the tests hold for them, too.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ops_cases import context_slots, layer_of, make_batch, make_twin, paddle_batch, to_array, to_paddle

from fastkv.ops import append_attention
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import from_float32, to_float32

FloatRows = np.ndarray
SHAPES = [(64, 64, 1), (64, 64, 3), (128, 128, 4), (192, 128, 2), (256, 256, 8)]
"""Length of a key, length of a value, query heads a kv head."""


def bfloat16_rows(rng: np.random.Generator, *shape: int) -> FloatRows:
    """Normal random numbers that bfloat16 has, as float32."""
    return to_float32(from_float32(rng.standard_normal(shape).astype(np.float32), "bfloat16"), "bfloat16")


def decode(q: FloatRows, keys: FloatRows, values: FloatRows, twin_seed: int = 0) -> tuple[FloatRows, ...]:
    """Attention of the last position over all, of one request.

    Args:
        q: [heads, dim]; keys, values: [positions, kv heads, dim], bfloat16's numbers.

    Returns:
        [heads, value dim] each: by the op, by the reference over the same cache, and over rows that nothing rounded.
    """
    rng = np.random.default_rng(twin_seed)
    context, heads, blocks = len(keys) - 1, keys.shape[1], -(-len(keys) // 16)
    batch = make_batch(rng, [1], [context], 16, blocks)
    dims = {"dim": keys.shape[2], "value_dim": values.shape[2]}
    twin, plain = (
        make_twin(rng, *storage, blocks=blocks, kv_heads=heads, block_size=16, **dims)
        for storage in (("int4_zp", "bfloat16"), ("none", "float32"))
    )
    slots = context_slots(batch, 16)
    for cache in (twin, plain):
        cache.key.write(slots, keys[:-1])
        cache.value.write(slots, values[:-1])
    rows = [from_float32(x, "bfloat16") for x in (q[None], keys[-1:], values[-1:])]
    scale = q.shape[1] ** -0.5
    out = append_attention(
        *(to_paddle(x) for x in rows), layer_of(twin.key, twin.value), paddle_batch(batch), softmax_scale=scale
    )
    expected = ref.append_attention(*rows, twin.key, twin.value, batch, softmax_scale=scale)
    exact = ref.append_attention(q[None], keys[-1:], values[-1:], plain.key, plain.value, batch, softmax_scale=scale)
    return to_float32(to_array(out), "bfloat16")[0], to_float32(expected, "bfloat16")[0], exact[0]


def rms(x: FloatRows) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("positions", [7, 33, 128, 700])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0], ids="scores spread by {}".format)
def test_int4_decode_in_bfloat16_loses_far_less_than_four_bits_do(
    rng: np.random.Generator, isa: str, shape: tuple[int, int, int], positions: int, spread: float
) -> None:
    dim, value_dim, group = shape
    q = to_float32(from_float32(spread * bfloat16_rows(rng, 2 * group, dim), "bfloat16"), "bfloat16")
    out, expected, exact = decode(q, bfloat16_rows(rng, positions, 2, dim), bfloat16_rows(rng, positions, 2, value_dim))
    rounding = 2.0**-9 * rms(expected)  # of the result, to bfloat16
    assert rms(out - expected) <= 0.2 * rms(expected - exact) + rounding


@pytest.mark.parametrize("positions", [32, 101, 1000])
@pytest.mark.parametrize("sink", ["first", "last"])
def test_int4_decode_in_bfloat16_keeps_small_weights_beside_a_large_one(
    rng: np.random.Generator, isa: str, positions: int, sink: str
) -> None:
    """One token has most of the weight, as models have them. The others' weights pass, as the score between them and
    it grows, half of what a byte resolves of the largest weight; together they are up to a tenth of it, or more."""
    keys, values = bfloat16_rows(rng, positions, 1, 64), bfloat16_rows(rng, positions, 1, 64)
    at = 0 if sink == "first" else positions - 1
    keys[:, 0, :2] = -2.0
    keys[at, 0, :2] = 2.0
    q = np.zeros((1, 64), np.float32)
    for gap in (4.0, 4.5, 5.0, 5.5, 6.0, 6.5):
        q[0, :2] = gap  # softmax_scale is 1/8, two channels differ by 4: the gap, but for what four bits make of it
        out, expected, _ = decode(q, keys, values)
        assert rms(out - expected) <= 0.02 * rms(values)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_int4_sums_of_sixteen_bits_hold_the_largest_products(isa: str, dim: int, sign: float) -> None:
    """Products of the largest codes with the largest bytes, all of one sign: of equal weights, and of a query."""
    for positions in (32, 128, 129):
        q = np.full((4, dim), 2.0 * sign, np.float32)
        keys = np.full((positions, 1, dim), 100.0, np.float32)  # beyond what any scale holds: the last code
        values = np.full((positions, 1, dim), 100.0 * sign, np.float32)
        out, expected, _ = decode(q, keys, values)
        np.testing.assert_allclose(out, expected, rtol=2**-7)
        keys[::2] *= -1  # the first code; either these positions have all the weight, or the others
        values[::2] *= -1
        out, expected, _ = decode(q, keys, values)
        np.testing.assert_allclose(out, expected, rtol=2**-7)
