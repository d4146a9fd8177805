"""From a memory budget to a number of blocks, and the report a person reads before starting.

Never over the budget, and within one block of it. Reads every byte count from the CacheSpec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastkv.core.spec import CacheSpec, Level
from fastkv.errors import ConfigError

MAX_BLOCKS = 2**31 - 1
"""Block ids are int32."""

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS[f"{_prefix}B"] = 1000**_power
    _UNITS[f"{_prefix}iB"] = 1024**_power


class BudgetBelowOneBlockError(ConfigError):
    """A budget that is valid in itself does not hold one block of this spec."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory for one level: an absolute number of bytes, or a fraction of what the device has.

    Exactly one of the two fields is set.
    """

    num_bytes: int | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, value: int | float | str) -> MemoryBudget:
        """Read 1073741824, "16GiB", "500 MB", or a fraction such as 0.9.

        Raises:
            ConfigError: neither a size nor a fraction.
        """
        problem = f"memory {value!r} is no size; write bytes (1073741824), a size (16GiB) or a fraction (0.9)"
        if isinstance(value, float):
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{problem}; a fraction lies in (0, 1]")
            return cls(fraction=value)
        if isinstance(value, int):
            if value < 0:
                raise ConfigError(f"{problem}; it cannot be negative")
            return cls(num_bytes=value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value)
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f"{problem}; units: {', '.join(u for u in _UNITS if u)}")
        if "." in match[1] and not match[2]:
            raise ConfigError(f"{problem}; a fraction is written without quotes")
        return cls(num_bytes=int(float(match[1]) * _UNITS[match[2]]))

    def resolve(self, capacity_bytes: int | None) -> int:
        """The budget in bytes.

        Args:
            capacity_bytes: bytes that the device has; needed for a fraction.

        Raises:
            ConfigError: a fraction of an unknown capacity.
        """
        if self.num_bytes is not None:
            return self.num_bytes
        if capacity_bytes is None or self.fraction is None:
            raise ConfigError(
                f"device_memory {self.fraction} is a fraction of the device's memory, whose size is not known here; "
                "set device.memory (for example 80GiB) or give the budget as a size"
            )
        return int(self.fraction * capacity_bytes)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Blocks and bytes of one rank.

    Attributes:
        spec: what a block is.
        num_device_blocks: blocks of the pool that requests share.
        num_host_blocks: records of the host pool; 0 without one.
        device_budget_bytes, host_budget_bytes: what was asked; None when block counts were given instead.
    """

    spec: CacheSpec
    num_device_blocks: int
    num_host_blocks: int = 0
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None

    @property
    def device_tokens(self) -> int:
        """Tokens that the device pool holds."""
        return self.num_device_blocks * self.spec.block_size

    @property
    def device_bytes(self) -> int:
        """Payload bytes on the device, main and MTP."""
        return self.spec.payload_bytes(Level.DEVICE, self.num_device_blocks)

    @property
    def host_bytes(self) -> int:
        """Payload bytes of the host pool."""
        return self.spec.payload_bytes(Level.HOST, self.num_host_blocks)

    def group_bytes(self, name: str) -> int:
        """Device bytes of one layer group."""
        group = self.spec.group(name)
        return group.num_blocks(self.num_device_blocks) * group.block_bytes

    def full_length_requests(self, max_context: int) -> int:
        """How many requests of max_context tokens fit at once, sharing nothing."""
        return self.num_device_blocks // -(-max_context // self.spec.block_size)


def plan_capacity(
    spec: CacheSpec,
    *,
    device_budget_bytes: int | None = None,
    num_device_blocks: int | None = None,
    host_budget_bytes: int | None = None,
    num_host_blocks: int | None = None,
) -> CapacityPlan:
    """Turn budgets (or fixed block counts) into a plan.

    Args:
        spec: what a block is.
        device_budget_bytes | num_device_blocks: exactly one of the two.
        host_budget_bytes | num_host_blocks: at most one; neither means no host pool. A host block costs the record
            stride, which pads roles to 16 bytes and records to 64.

    Raises:
        ConfigError: both or neither are given, or the device budget is below one block.
    """
    if (device_budget_bytes is None) == (num_device_blocks is None):
        raise ConfigError("give either device_memory or num_device_blocks, not both and not neither")
    if host_budget_bytes is not None and num_host_blocks is not None:
        raise ConfigError("give either host_memory or num_host_blocks, not both")
    if num_device_blocks is None:
        assert device_budget_bytes is not None
        num_device_blocks = device_budget_bytes // spec.pool_block_bytes
        if num_device_blocks < 1:
            raise BudgetBelowOneBlockError(
                f"device_memory of {device_budget_bytes} bytes is below one block of {spec.pool_block_bytes} bytes "
                f"(block_size {spec.block_size}, {spec.storage.name}); raise it or lower block_size"
            )
    elif num_device_blocks < 1:
        raise ConfigError(f"num_device_blocks must be at least 1, got {num_device_blocks}")
    if num_host_blocks is None:
        num_host_blocks = (host_budget_bytes or 0) // spec.record_stride_bytes
        if host_budget_bytes and num_host_blocks < 1:
            raise BudgetBelowOneBlockError(
                f"host_memory of {host_budget_bytes} bytes is below one block record of "
                f"{spec.record_stride_bytes} bytes; raise it or set it to 0"
            )
    elif num_host_blocks < 0:
        raise ConfigError(f"num_host_blocks must not be negative, got {num_host_blocks}")
    for name, count in (("device", num_device_blocks), ("host", num_host_blocks)):
        if count > MAX_BLOCKS:
            raise ConfigError(
                f"{count} {name} blocks are more than block ids can name ({MAX_BLOCKS}); use larger blocks or "
                "less memory"
            )
    return CapacityPlan(spec, num_device_blocks, num_host_blocks, device_budget_bytes, host_budget_bytes)
