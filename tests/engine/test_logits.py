"""Logits over the paged cache against full recompute, within written tolerances."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from helpers.engine import TINY, tiny_config

from fastkv import load_config
from fastkv.engine import recompute
from fastkv.engine.evaluation import PagedModel
from fastkv.engine.llama import LlamaModel
from fastkv.engine.model import CausalModel, load_model

SMOLLM2 = Path(__file__).parents[2] / "configs" / "smollm2.yaml"
# Largest difference of any logit. Unquantised: float32 rounding; half precision: K and V keep 11 or 8
# bits, and this model's queries are four times as sharp as a real one's (measured 0.03 and 0.28 of logits up to 12).
TINY_TOLERANCE = {"float32": 1e-4, "float16": 1e-1, "bfloat16": 8e-1}
SMOLLM2_TOLERANCE = 2e-3


def paged_logits(paged: PagedModel, token_ids: list[int], chunk: int) -> np.ndarray:
    """Logits of every position: a prefill in chunks, the last three tokens decoded one by one."""
    cuts = [*range(0, len(token_ids) - 3, chunk), *range(len(token_ids) - 3, len(token_ids) + 1)]
    pieces = [paged.step([token_ids[a:b]], [a], True) for a, b in pairwise(cuts)]
    return np.concatenate(pieces)


@pytest.mark.parametrize("manager", ["v0", "v1"])
@pytest.mark.parametrize("dtype", TINY_TOLERANCE)
def test_logits_of_the_tiny_model_stay_within_tolerance(dtype: str, manager: str) -> None:
    config = tiny_config(model={"dtype": dtype}, cache={"manager": manager, "block_size": 8})
    model: CausalModel = load_model(config)
    assert isinstance(model, LlamaModel)
    token_ids = np.random.default_rng(1).integers(0, TINY["vocab_size"], 61).tolist()
    got = paged_logits(PagedModel(model, config, 1, 64), token_ids, chunk=13)
    np.testing.assert_allclose(got, recompute.logits(model, token_ids), rtol=0, atol=TINY_TOLERANCE[dtype])


def test_logits_of_the_real_model_stay_within_tolerance() -> None:
    config = load_config(SMOLLM2, {"cache.device_memory": "64MiB", "cache.host_memory": None})
    model = load_model(config)
    assert isinstance(model, LlamaModel)
    token_ids = np.random.default_rng(2).integers(0, model.vocab_size, 150).tolist()
    got = paged_logits(PagedModel(model, config, 1, 160), token_ids, chunk=64)
    np.testing.assert_allclose(got, recompute.logits(model, token_ids), rtol=0, atol=SMOLLM2_TOLERANCE)
