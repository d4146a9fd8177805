"""Static scales derived from calibrated ranges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.toy import toy_config

from fastkv.core.scales import CalibrationRanges, ValueRange, derive_scales, rank_heads
from fastkv.core.spec import Role
from fastkv.errors import ConfigError


def ranges(layers: int = 3, heads: int = 2, dim: int = 8, model: str = "toy") -> CalibrationRanges:
    def one(seed: int) -> ValueRange:
        rng = np.random.default_rng(seed)
        low = -rng.uniform(1, 4, (heads, dim)).astype(np.float32)
        high = rng.uniform(1, 8, (heads, dim)).astype(np.float32)
        return ValueRange(low, high)

    table = {layer: {Role.KEY: one(2 * layer), Role.VALUE: one(2 * layer + 1)} for layer in range(layers)}
    return CalibrationRanges(model, "", "max", 100, table)


def test_scales_without_zero_point_map_the_largest_magnitude_to_the_bound() -> None:
    spec = toy_config(quant_type="int8").cache_spec()
    source = ranges()
    scales = derive_scales(source, spec, 0, "toy")
    assert set(scales) == {0, 1, 2}
    entry = source.layers[1][Role.KEY]
    expected = np.maximum(-entry.minimum, entry.maximum).reshape(-1) / np.float32(127)
    np.testing.assert_array_equal(scales[1][Role.KEY].scale, expected)
    assert scales[1][Role.KEY].zero_point is None


@pytest.mark.parametrize(
    ("quant_type", "low", "high"), [("int8_zp", -128, 127), ("int4_zp", -8, 7), ("fp8_zp", -448, 448)]
)
def test_scales_with_zero_point_map_the_range_to_every_code(quant_type: str, low: int, high: int) -> None:
    source = ranges()
    scales = derive_scales(source, toy_config(quant_type=quant_type).cache_spec(), 0, "toy")
    entry, got = source.layers[2][Role.VALUE], scales[2][Role.VALUE]
    assert got.zero_point is not None
    np.testing.assert_allclose(entry.minimum.reshape(-1) / got.scale + got.zero_point, low, rtol=1e-5)
    np.testing.assert_allclose(entry.maximum.reshape(-1) / got.scale + got.zero_point, high, rtol=1e-5)


def test_scales_per_head_cover_every_channel_of_the_head() -> None:
    source = ranges()
    scales = derive_scales(source, toy_config(quant_type="fp8", scale_granularity="head").cache_spec(), 0, "toy")
    entry = source.layers[0][Role.KEY]
    expected = np.maximum(-entry.minimum, entry.maximum).max(axis=1) / np.float32(448)
    np.testing.assert_array_equal(scales[0][Role.KEY].scale, expected)


def test_scales_of_all_ranks_are_the_whole_models_in_order() -> None:
    source = ranges()
    whole = derive_scales(source, toy_config(quant_type="int8").cache_spec(), 0, "toy")
    spec = toy_config(quant_type="int8", tp_size=2).cache_spec()
    shards = [derive_scales(source, spec, rank, "toy")[1][Role.KEY].scale for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(shards), whole[1][Role.KEY].scale)
    assert [rank_heads(2, 4, rank) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]


def _zero_channel(source: CalibrationRanges) -> None:
    entry = source.layers[1][Role.KEY]
    entry.minimum[0, 3] = entry.maximum[0, 3] = 0


def _not_finite(source: CalibrationRanges) -> None:
    source.layers[1][Role.KEY].maximum[0, 0] = np.inf


def _reversed(source: CalibrationRanges) -> None:
    source.layers[1][Role.KEY].minimum[0, 0] = 100


@pytest.mark.parametrize(
    ("source", "spoil", "message"),
    [
        (ranges(), _zero_channel, "layer 1 .main., key: scale 3 is zero"),
        (ranges(), _not_finite, "NaN or infinity"),
        (ranges(), _reversed, "above its maximum"),
        (ranges(layers=2), None, "layer 2 .mtp., key: missing"),
        (ranges(heads=3), None, r"shape \[3, 8\], this model needs .* \[2, 8\]"),
        (ranges(dim=16), None, r"shape \[2, 16\]"),
        (ranges(model="other"), None, "calibrated for model 'other', this config runs 'toy'"),
    ],
)
def test_scales_that_do_not_fit_raise_and_never_default(
    source: CalibrationRanges, spoil: Callable[[CalibrationRanges], None] | None, message: str
) -> None:
    """vLLM#25800, FastDeploy#5125: a missing or zero scale silently became 1."""
    if spoil is not None:
        spoil(source)
    with pytest.raises(ConfigError, match=message):
        derive_scales(source, toy_config(quant_type="int8").cache_spec(), 0, "toy")


@pytest.mark.parametrize("rank", [-1, 1])
def test_scales_of_an_unknown_rank_are_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        derive_scales(ranges(), toy_config(quant_type="int8").cache_spec(), rank, "toy")


def test_scales_for_a_type_without_static_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_wise_fp8 has no static scales"):
        derive_scales(ranges(), toy_config(quant_type="block_wise_fp8").cache_spec(), 0, "toy")
