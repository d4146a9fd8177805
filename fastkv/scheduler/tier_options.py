"""How blocks move between levels: write policy, deadlines and bounds.

Made from the config by the engine, read by TierManager (tiers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fastkv.errors import ConfigError


class WritePolicy(str, Enum):
    """When a block is copied to the host."""

    WRITE_THROUGH = "write_through"  # once it is computed
    WRITE_THROUGH_SELECTIVE = "write_through_selective"  # once enough matches have found it
    WRITE_BACK = "write_back"  # when it is about to leave the device


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How blocks move.

    Attributes:
        write_policy: when blocks are copied to the host.
        write_through_threshold: matches that must have found a block under write_through_selective.
        num_ranks: ranks that carry out every plan.
        has_storage: whether what lands on the host is written on to storage.
        transfer_timeout_s: after that a copy between device and host has failed.
        store_timeout_s, fetch_timeout_s: likewise of storage; a prompt waits for a fetch no longer.
        lookup_timeout_s: how long storage may take to say what it has.
        retry_after_s: after a write-back failed, blocks are evicted without one for so long.
    """

    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    write_through_threshold: int = 2
    num_ranks: int = 1
    has_storage: bool = False
    transfer_timeout_s: float = 30.0
    store_timeout_s: float = 60.0
    fetch_timeout_s: float = 2.0
    lookup_timeout_s: float = 0.05
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        if self.write_through_threshold < 1 or self.num_ranks < 1:
            raise ConfigError(
                f"write_through_threshold {self.write_through_threshold} and num_ranks {self.num_ranks} must be at "
                "least 1"
            )
