"""Calibration: the range of every channel of what a layer caches, over real text.

Runs the model without any cache (as `recompute` does) and looks at what would be written to one: keys after rotary
embedding and values, or MLA's latents, rotary part rotated. Called by `fastkv calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastkv.core.scales import ValueRange
from fastkv.core.spec import Role
from fastkv.engine.llama import Attend, LlamaModel
from fastkv.engine.mla import LatentAttend, MlaModel, expanded_attend
from fastkv.engine.recompute import causal_attention, causal_mask, rotate
from fastkv.errors import ConfigError

FloatArray = npt.NDArray[np.float32]


class RangeCollector:
    """Smallest and largest value of each channel seen so far, or a percentile of each side.

    Args:
        percentile: 100.0 keeps the extremes; below, that share of values lies inside the range, split evenly between
            both tails. Percentiles keep every value until the end: tokens x channels x 4 bytes for each role.
    """

    def __init__(self, percentile: float = 100.0) -> None:
        if not 50.0 < percentile <= 100.0:
            raise ConfigError(f"percentile {percentile} must lie in (50, 100]; 100 takes the extremes")
        self.percentile = percentile
        self._extremes: dict[tuple[int, Role], ValueRange] = {}
        self._values: dict[tuple[int, Role], list[FloatArray]] = {}

    @property
    def method(self) -> str:
        """How ranges are taken, for the scales file."""
        return "max" if self.percentile == 100.0 else f"percentile {self.percentile:g}"

    def add(self, layer: int, role: Role, values: FloatArray) -> None:
        """Look at values [num_tokens, heads, dim]."""
        if self.percentile < 100.0:
            self._values.setdefault((layer, role), []).append(values.copy())
            return
        low, high = values.min(axis=0), values.max(axis=0)
        if (seen := self._extremes.get((layer, role))) is not None:
            low, high = np.minimum(low, seen.minimum), np.maximum(high, seen.maximum)
        self._extremes[layer, role] = ValueRange(low, high)

    def ranges(self) -> dict[int, dict[Role, ValueRange]]:
        """Layer -> role -> range of everything seen."""
        found = dict(self._extremes)
        tail = (100.0 - self.percentile) / 2
        for key, chunks in self._values.items():
            values = np.concatenate(chunks)
            low, high = np.percentile(values, [tail, 100.0 - tail], axis=0)
            found[key] = ValueRange(low.astype(np.float32), high.astype(np.float32))
        layers: dict[int, dict[Role, ValueRange]] = {}
        for (layer, role), entry in sorted(found.items()):
            layers.setdefault(layer, {})[role] = entry
        return layers


def collect_ranges(
    model: LlamaModel | MlaModel,
    token_ids: Sequence[int],
    collector: RangeCollector,
    *,
    chunk_tokens: int = 512,
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Run a text through the model in chunks of their own and show everything it would cache to the collector.

    Args:
        model: the model.
        token_ids: the text; a last chunk shorter than 2 tokens is left out.
        collector: what remembers ranges.
        chunk_tokens: tokens of one chunk, each starting at position 0.
        on_progress: called with the number of tokens done.

    Returns:
        Tokens that were run.

    Raises:
        ConfigError: fewer than 2 tokens.
    """
    if len(token_ids) < 2:
        raise ConfigError(f"calibration needs text; got {len(token_ids)} tokens")
    done = 0
    for start in range(0, len(token_ids), chunk_tokens):
        chunk = list(token_ids[start : start + chunk_tokens])
        if len(chunk) > 1:
            _run_chunk(model, chunk, collector)
            done += len(chunk)
        if on_progress is not None:
            on_progress(done)
    return done


def _run_chunk(model: LlamaModel | MlaModel, chunk: list[int], collector: RangeCollector) -> None:
    tokens, positions = paddle.to_tensor(chunk, dtype="int64"), paddle.arange(len(chunk), dtype="int64")
    if isinstance(model, MlaModel):
        model.forward(tokens, positions, _watched_latents(model, len(chunk), collector))
    else:
        model.forward(tokens, positions, _watched_keys_and_values(model, positions, collector))


def _watched_keys_and_values(model: LlamaModel, positions: Tensor, collector: RangeCollector) -> Attend:
    mask = causal_mask(int(positions.shape[0]))

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = model.split_heads(qkv)
        k = rotate(k, model.rope, positions)
        collector.add(layer, Role.KEY, k.numpy())
        collector.add(layer, Role.VALUE, v.numpy())
        return causal_attention(rotate(q, model.rope, positions), k, v, model.softmax_scale, mask).flatten(1)

    return attend


def _watched_latents(model: MlaModel, num_tokens: int, collector: RangeCollector) -> LatentAttend:
    expanded = expanded_attend(model, num_tokens)

    def attend(layer: int, q: Tensor, latent: Tensor) -> Tensor:
        collector.add(layer, Role.LATENT, latent.unsqueeze(1).numpy())
        return expanded(layer, q, latent)

    return attend
