"""What a call of LLM.generate gives back: outputs, and a report of how it went.

Made by LLM, printed by `fastkv generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastkv.engine.levels import Moved

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt became. finish_reason is "stop" or "length"."""

    prompt: Prompt
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """How a call of `generate` went.

    Attributes:
        storage_dtype: dtype of the key tensors, asked of the tensors.
        kv_cache_quant_type: how they are quantised, "none" if not.
        cache_manager, worker: "v0" or "v1"; "inline" or "process".
        device_cache_bytes, mtp_cache_bytes, host_cache_bytes: what the worker holds.
        num_blocks, block_size: the device pool; peak_blocks of it were in requests at once.
        prompt_tokens, prefix_hit_tokens: tokens of all prompts, and how many of them were found in the cache.
        prefill_tokens, output_tokens: prompt tokens computed, and tokens generated.
        prefill_tokens_per_s: prompt tokens a second of worker time in steps that computed any.
        decode_tokens_per_s: tokens a second in steps that only generated.
        write_policy: when blocks are copied to the host.
        moved: blocks that moved between device, host and storage.
        storage_counters, storage_error: the storage backend's events since the engine was made, and its last fault.
        transfer_error: why the last copy failed, "" if none did since the engine was made.
    """

    storage_dtype: str
    cache_manager: str
    kv_cache_quant_type: str
    worker: str
    device_cache_bytes: int
    mtp_cache_bytes: int
    host_cache_bytes: int
    num_blocks: int
    block_size: int
    peak_blocks: int
    prompt_tokens: int
    prefix_hit_tokens: int
    prefill_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    write_policy: str
    moved: Moved
    storage_counters: dict[str, int]
    storage_error: str
    transfer_error: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Generation:
    """Outputs in the order of the prompts, and the report."""

    outputs: list[Output]
    report: Report


@dataclass(slots=True)
class Meter:
    """Token and time counters of one generate call."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    peak_blocks: int = 0

    def count(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        if prefill_tokens:
            self.prefill_tokens += prefill_tokens
            self.prefill_s += seconds
        else:
            self.decode_tokens += decode_tokens
            self.decode_s += seconds
