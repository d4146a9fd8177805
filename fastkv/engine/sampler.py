"""Choosing the next token from logits: greedy, or seeded sampling at a temperature.

Owns the choice itself, in NumPy; what a request asks for is a `SamplingParams`, as it crosses to the worker. Called by
the worker once a step, and by the front end to check a request before it is admitted.

What always holds: the choice is a function of the row of logits, the temperature, the seed and the token's index.
Neither the batch nor the order of requests nor what was sampled before enters it, so a request that is preempted,
recomputed or batched differently draws the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastkv.core.messages import SamplingParams
from fastkv.errors import InvariantError, RequestError

_MAX_SEED = (1 << 64) - 1


def check_sampling(params: SamplingParams) -> None:
    """Raises RequestError unless temperature is a finite number, not negative, and seed an integer of 64 bits."""
    temperature, seed = params.temperature, params.seed
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"temperature is {temperature!r}; give 0 (greedy) or a positive number")
    if not (isinstance(seed, int) and 0 <= seed <= _MAX_SEED):
        raise RequestError(f"seed is {seed!r}; give an integer from 0 to 2**64 - 1")


def sample(logits: npt.NDArray[np.floating[Any]], params: SamplingParams, index: int) -> int:
    """The next token of one request.

    Args:
        logits: floats [vocab_size].
        params: what the request asks for, valid by `check_sampling`.
        index: which token of the sequence or of the output is chosen; keys the random number, so the caller counts
            the same way every time. Unused when greedy.

    Returns:
        A token id; among equal logits greedy takes the lowest.

    Raises:
        InvariantError: the logits hold NaN or +inf, or nothing but -inf: something before the sampler is broken.
    """
    best = int(logits.argmax())  # a NaN wins argmax, so looking at the winner finds every NaN
    if not math.isfinite(logits[best]):
        raise InvariantError(
            f"logits are not finite: token {best} has {logits[best]}; the step that made them is wrong"
        )
    if params.temperature == 0:
        return best
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        weights = np.exp((logits.astype(np.float64) - float(logits[best])) / params.temperature)
    cumulative = np.cumsum(weights)
    # One uniform number below 1 for each (seed, index), from a generator that is a pure function of its key.
    uniform = np.random.Generator(np.random.Philox(key=np.array([params.seed, index], np.uint64))).random()
    # side="right" passes over tokens of weight 0, even for the number 0; the minimum guards against rounding up.
    chosen = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(chosen, int(np.flatnonzero(weights)[-1]))


def sample_rows(logits: Any, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """`sample` for each row of logits [rows, vocab_size], a NumPy array or a Paddle tensor.

    Raises:
        InvariantError: the three arguments differ in length, or as `sample` does.
    """
    rows = logits if isinstance(logits, np.ndarray) else logits.numpy()
    if not len(rows) == len(params) == len(indices):
        raise InvariantError(
            f"{len(rows)} rows of logits for {len(params)} sampling parameters and {len(indices)} indices"
        )
    return [sample(row, p, index) for row, p, index in zip(rows, params, indices, strict=True)]
