"""Ops tests need Paddle on the CPU; threads must be set before it is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

from collections.abc import Iterator

import numpy as np
import pytest

from fastkv.ops import force_isa, supported_isas


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture(params=supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once with each instruction set that this machine has."""
    force_isa(request.param)
    yield request.param
    force_isa("best")
