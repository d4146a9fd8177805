"""What a step's attention calls have in common: the ragged batch, and the rotary tables.

Built once a step (Rope: once a model) and handed to every layer's call; a layer pays only for its own tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastkv.errors import ConfigError, RequestError
from fastkv.ops._load import make_view
from fastkv.ops.checks import check_tensor, describe, is_static_graph

ROPE_STYLES = ("neox", "interleaved")


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's requests. Request r owns tokens query_start[r] to query_start[r + 1]; its token t sits at position
    context_lens[r] + t. Tokens past the last request are padding: slot -1, output zeros.

    Args:
        block_tables: int32 [batch, max_blocks], padded with -1; a block is read only if the step needs it.
        query_start: int32 [batch + 1], prefix sums of query lengths (0 is a legal length).
        context_lens: int32 [batch], tokens in the cache before this step.
        slot_mapping: int64 [num_tokens]: where each token's key and value go; -1: attended from, not written, the
            cache holds that position already.
        All contiguous, on the CPU.

    Raises:
        ConfigError: dtype, shape, device or contiguity.
        RequestError: lengths that do not ascend from 0, or one slot given to two tokens.
    """

    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    view: Any = field(init=False, default=False, repr=False, compare=False)
    """Its addresses, for the kernels; False if these are variables of a static graph."""

    def __post_init__(self) -> None:
        check_tensor(self.block_tables, "block_tables", paddle.int32, 2, "int32 [batch, max_blocks]")
        check_tensor(self.query_start, "query_start", paddle.int32, 1, "int32 [batch + 1]")
        check_tensor(self.context_lens, "context_lens", paddle.int32, 1, "int32 [batch]")
        check_tensor(self.slot_mapping, "slot_mapping", paddle.int64, 1, "int64 [num_tokens]")
        if is_static_graph():
            return
        batch = int(self.block_tables.shape[0])
        if list(self.query_start.shape) != [batch + 1] or list(self.context_lens.shape) != [batch]:
            raise ConfigError(
                f"block_tables is {describe(self.block_tables)}, so query_start must be int32 [{batch + 1}] and "
                f"context_lens int32 [{batch}], but they are {describe(self.query_start)} and "
                f"{describe(self.context_lens)}"
            )
        self._check_contents()
        parts = (self.block_tables, self.query_start, self.context_lens, self.slot_mapping)
        object.__setattr__(self, "view", make_view("batch", *parts))

    @classmethod
    def from_numpy(
        cls,
        block_tables: npt.NDArray[np.int32],
        query_start: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int64],
    ) -> AttentionBatch:
        """The same from NumPy arrays, which are copied."""
        place = paddle.CPUPlace()
        arrays = (block_tables, query_start, context_lens, slot_mapping)
        return cls(*(paddle.to_tensor(array, place=place) for array in arrays))

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return int(self.slot_mapping.shape[0])

    def _check_contents(self) -> None:
        starts = self.query_start.numpy()
        if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > self.num_tokens:
            raise RequestError(
                f"query_start must ascend from 0 to at most {self.num_tokens}, the tokens of slot_mapping, but is "
                f"{starts.tolist()}"
            )
        slots = self.slot_mapping.numpy()
        written = np.sort(slots[slots >= 0])
        twice = np.flatnonzero(written[1:] == written[:-1])
        if twice.size:
            raise RequestError(
                f"slot {written[twice[0]]} is given to two tokens of one step; each token needs a slot of its own "
                "(or -1: don't write)"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables that append_attention applies to queries and keys.

    Args:
        cos, sin: float32 [max_position, rotary_dim / 2], contiguous, on the CPU; rotary_dim <= head_dim.
        style: "neox" pairs element i with i + rotary_dim / 2 (rotate half), "interleaved" 2i with 2i + 1.

    Raises:
        ConfigError: dtype, shape, device, contiguity or style.
    """

    cos: Tensor
    sin: Tensor
    style: str = "neox"
    view: Any = field(init=False, default=False, repr=False, compare=False)
    """Its addresses, for the kernels; False if these are variables of a static graph."""

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):
            layout = "float32 [max_position, rotary_dim / 2]"
            check_tensor(getattr(self, name), f"rope {name}", paddle.float32, 2, layout)
        if list(self.cos.shape) != list(self.sin.shape):
            raise ConfigError(f"rope cos is {describe(self.cos)}, but sin is {describe(self.sin)}: shapes must agree")
        if self.style not in ROPE_STYLES:
            raise ConfigError(f"unknown rope style {self.style!r}; allowed: {', '.join(ROPE_STYLES)}")
        if isinstance(self.cos, Tensor):
            object.__setattr__(self, "view", make_view("rope", self.cos, self.sin, self.style))
