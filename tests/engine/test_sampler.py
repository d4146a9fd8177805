"""Greedy and seeded sampling: exact ties, exact repeatability, the right distribution."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv.core.messages import SamplingParams
from fastkv.engine.sampler import check_sampling, sample, sample_rows
from fastkv.errors import InvariantError, RequestError

GREEDY = SamplingParams()


def test_greedy_with_ties_takes_lowest_id() -> None:
    assert sample(np.array([0.0, 3.0, 3.0, -1.0], np.float32), GREEDY, 0) == 1
    assert sample(np.zeros(5, np.float32), GREEDY, 9) == 0


def test_sampling_is_a_function_of_seed_and_index_only() -> None:
    """Rows of one batch in any order and company, NumPy or Paddle, give what each gives alone."""
    logits = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    params = [SamplingParams(1.0, seed) for seed in (1, 2, 3, 1, 2**64 - 1)] + [GREEDY]
    indices = [0, 5, 5, 1, 0, 7]
    alone = [sample(logits[i], params[i], indices[i]) for i in range(6)]
    order = [3, 5, 0, 4, 1, 2]
    shuffled = sample_rows(logits[order], [params[i] for i in order], [indices[i] for i in order])
    assert shuffled == [alone[i] for i in order]
    assert sample_rows(paddle.to_tensor(logits), params, indices) == alone


def test_sampling_differs_between_seeds_and_between_indices() -> None:
    flat = np.zeros(1000, np.float32)
    by_seed = [sample(flat, SamplingParams(1.0, seed), 0) for seed in range(20)]
    by_index = [sample(flat, SamplingParams(1.0, 0), index) for index in range(20)]
    assert len(set(by_seed)) > 15
    assert len(set(by_index)) > 15
    assert by_seed[1:] != by_index[1:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_follow_softmax_at_temperature(temperature: float) -> None:
    """4,000 draws: each frequency within five standard deviations of its probability."""
    logits, draws = np.array([1.0, 0.0, 2.0, -1.0, -np.inf], np.float32), 4000
    expected = np.exp(logits / temperature)
    expected /= expected.sum()
    counts = np.zeros(5)
    for index in range(draws):
        counts[sample(logits, SamplingParams(temperature, 11), index)] += 1
    assert counts[4] == 0
    assert (np.abs(counts / draws - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-(2.0**100), 2.0**100, width=32) | st.just(float("-inf")), min_size=1, max_size=20),
    temperature=st.floats(1e-300, 1e300),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**31),
)
def test_any_finite_logits_give_a_token_that_is_possible(
    logits: list[float], temperature: float, seed: int, index: int
) -> None:
    row = np.array(logits, np.float32)
    if not np.isfinite(row.max()):
        with pytest.raises(InvariantError):
            sample(row, SamplingParams(temperature, seed), index)
        return
    token = sample(row, SamplingParams(temperature, seed), index)
    assert 0 <= token < len(row)
    assert np.isfinite(row[token])


def test_tiny_temperature_is_greedy() -> None:
    logits = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    assert {sample(logits, SamplingParams(1e-9, seed), 0) for seed in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 1)])
def test_logits_that_are_not_finite_are_an_invariant_error(bad: float, params: SamplingParams) -> None:
    """A stale or poisoned cache shows as NaN; taking its argmax would print garbage instead of failing."""
    logits = np.zeros(10, np.float32)
    logits[6] = bad
    with pytest.raises(InvariantError, match="token 6"):
        sample(logits, params, 0)


def test_rows_without_parameters_are_an_invariant_error() -> None:
    with pytest.raises(InvariantError, match="2 rows of logits for 1 sampling parameters and 2 indices"):
        sample_rows(np.zeros((2, 4), np.float32), [GREEDY], [0, 0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature=-0.1), "temperature is -0.1"),
        (SamplingParams(temperature=float("nan")), "temperature is nan"),
        (SamplingParams(temperature=float("inf")), "temperature is inf"),
        (SamplingParams(seed=-1), "seed is -1"),
        (SamplingParams(seed=2**64), "0 to 2\\*\\*64 - 1"),
        (SamplingParams(temperature="hot"), "temperature is 'hot'"),  # type: ignore[arg-type]
        (SamplingParams(seed=1.5), "seed is 1.5"),  # type: ignore[arg-type]
    ],
)
def test_sampling_parameters_out_of_range_are_request_errors(params: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_sampling(params)
    check_sampling(SamplingParams(0.7, 2**64 - 1))
