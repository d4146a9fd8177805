"""Budgets to blocks: never over, within one block."""

from __future__ import annotations

import pytest
from helpers.toy import toy_config
from hypothesis import given
from hypothesis import strategies as st

from fastkv.core.plan import MemoryBudget, plan_capacity
from fastkv.core.spec import Level
from fastkv.errors import ConfigError

TYPES = [None, "int8", "int4_zp", "block_wise_fp8"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1073741824, 2**30), ("16GiB", 16 * 2**30), ("500 MB", 500_000_000), ("1.5KiB", 1536), ("7", 7), ("0", 0)],
)
def test_budget_reads_bytes_and_sizes(value: int | str, expected: int) -> None:
    assert MemoryBudget.parse(value).resolve(None) == expected


def test_budget_fraction_needs_a_capacity() -> None:
    assert MemoryBudget.parse(0.5).resolve(1000) == 500
    with pytest.raises(ConfigError, match=r"set device\.memory"):
        MemoryBudget.parse(0.5).resolve(None)


@pytest.mark.parametrize("value", ["16 GiBs", "-1", "", "GiB", -1, 0.0, 1.5, float("nan"), "1KK"])
def test_budget_that_is_no_size_is_refused_with_its_value(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        MemoryBudget.parse(value)  # type: ignore[arg-type]
    assert repr(value) in str(error.value)


@given(quant_type=st.sampled_from(TYPES), device=st.integers(1000, 10**7), host=st.integers(1000, 10**7))
def test_plan_stays_within_one_block_below_the_budget(quant_type: str | None, device: int, host: int) -> None:
    spec = toy_config(quant_type=quant_type).cache_spec()
    plan = plan_capacity(spec, device_budget_bytes=device, host_budget_bytes=host)
    assert device - spec.pool_block_bytes < plan.device_bytes <= device
    assert plan.device_bytes == plan.group_bytes("main") + plan.group_bytes("mtp")
    host_allocated = plan.num_host_blocks * spec.record_stride_bytes
    assert host - spec.record_stride_bytes < host_allocated <= host
    assert plan.host_bytes == spec.payload_bytes(Level.HOST, plan.num_host_blocks) <= host_allocated


def test_plan_budget_below_one_block_is_refused_with_both_sizes() -> None:
    spec = toy_config().cache_spec()
    with pytest.raises(ConfigError, match="767 bytes is below one block of 768 bytes"):
        plan_capacity(spec, device_budget_bytes=767)
    with pytest.raises(ConfigError, match="100 bytes is below one block record"):
        plan_capacity(spec, num_device_blocks=1, host_budget_bytes=100)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device_budget_bytes": 10**6, "num_device_blocks": 3},
        {"num_device_blocks": 0},
        {"num_device_blocks": 3, "host_budget_bytes": 10**6, "num_host_blocks": 2},
        {"num_device_blocks": 3, "num_host_blocks": -1},
    ],
)
def test_plan_contradictory_counts_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        plan_capacity(toy_config().cache_spec(), **options)


def test_plan_full_length_requests_round_up_to_whole_blocks() -> None:
    plan = plan_capacity(toy_config().cache_spec(), num_device_blocks=10)
    assert plan.device_tokens == 40
    assert plan.full_length_requests(8) == 5
    assert plan.full_length_requests(9) == 3
    assert plan.full_length_requests(41) == 0
