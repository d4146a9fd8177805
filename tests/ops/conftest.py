"""Ops tests need Paddle on the CPU; threads must be set before it is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

from collections.abc import Iterator

import numpy as np
import pytest

from fastkv.errors import ConfigError
from fastkv.ops import force_isa


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture(params=["portable", "avx2", "avx2_normal"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once with each instruction set that this machine has."""
    try:
        force_isa(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    yield request.param
    force_isa("best")
