"""Quality of every way to store a cache: perplexity, and agreement with the unquantised cache. Behind `fastkv eval`.

Text is teacher-forced through the paged cache: a chunk's keys and values are written (quantised) first, then attended
from the cache, so what is attended is what is stored. All types read the same chunk in turn, the unquantised one
first, so that logits are compared while they exist and memory does not grow with the text.

Owns its own caches (RunnerCache under v0, CacheController under v1), just large enough for one window; talks to no
scheduler and sends no messages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import paddle

from fastkv.config import Config
from fastkv.engine.model import CausalModel
from fastkv.errors import ConfigError, InvariantError
from fastkv.ops import AttentionBatch
from fastkv.worker.controller import CacheController
from fastkv.worker.runner_cache import RunnerCache
from fastkv.worker.static_scales import load_static_scales

FloatRows = npt.NDArray[np.float32]
REFERENCE = "none"
_LARGEST_LOSS = 700.0  # its exponential is still a number
_CHUNK_TOKENS = 128  # rows of logits alive at once, for each of two types: 25 MB at a vocabulary of 49,152


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """What is read and continued.

    Attributes:
        windows: token ids; each window starts at position 0 with an empty cache.
        prompts: token ids that are continued greedily.
        continuation_tokens: greedy tokens after each prompt.
    """

    windows: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    continuation_tokens: int

    @classmethod
    def cut(
        cls,
        token_ids: Sequence[int],
        *,
        context_tokens: int,
        num_prompts: int = 4,
        prompt_tokens: int = 32,
        continuation_tokens: int = 32,
    ) -> EvaluationText:
        """Cut a text into windows of context_tokens, and take prompts from evenly spaced places of it.

        A last window of fewer than 2 tokens predicts nothing and is left out.

        Raises:
            ConfigError: too few tokens, or windows of fewer than 2 tokens.
        """
        tokens = tuple(token_ids)
        if len(tokens) < 2 or context_tokens < 2:
            raise ConfigError(
                f"{len(tokens)} tokens in windows of {context_tokens}: evaluation predicts each token of a window from "
                "those before it, so text and window need at least 2 tokens"
            )
        cuts = [tokens[start : start + context_tokens] for start in range(0, len(tokens), context_tokens)]
        length = min(prompt_tokens, len(tokens))
        starts = np.linspace(0, len(tokens) - length, num_prompts).astype(int)
        prompts = tuple(tokens[start : start + length] for start in starts)
        return cls(tuple(window for window in cuts if len(window) > 1), prompts, continuation_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that are read, all windows."""
        return sum(len(window) for window in self.windows)

    @property
    def work(self) -> int:
        """Tokens that one type computes: the unit of progress."""
        generated = len(self.prompts) * self.continuation_tokens
        return self.num_tokens + sum(len(prompt) for prompt in self.prompts) + generated


@dataclass(frozen=True, slots=True)
class StorageQuality:
    """One type's row.

    Attributes:
        kv_cache_quant_type: the type, "none" for the unquantised reference.
        storage_dtype: dtype of the cache tensors, asked of the tensors.
        bytes_per_token: cache bytes of one token on one rank.
        perplexity: exp of the mean negative log likelihood of the text's tokens.
        greedy_agreement: share of positions at which the most likely token is the reference's.
        common_prefix_tokens: mean length that a greedy continuation has in common with the reference's.
        continuation_tokens: what it would be if they were all the same.
        max_logit_difference, mean_logit_difference: of |logit - reference logit|, over all positions and tokens.
        tokens: predictions that perplexity and agreement are taken over.
    """

    kv_cache_quant_type: str
    storage_dtype: str
    bytes_per_token: float
    perplexity: float
    greedy_agreement: float
    common_prefix_tokens: float
    continuation_tokens: int
    max_logit_difference: float
    mean_logit_difference: float
    tokens: int


class PagedModel:
    """A model over caches of one config, for sequences that each own their blocks: rows of logits out.

    Args:
        model: the model; several PagedModels share one.
        config: type of the cache and who owns it.
        num_sequences, sequence_tokens: how many sequences there are at once, and how long they get.

    Raises:
        ConfigError: scales that are missing or do not fit, or not enough memory.
    """

    def __init__(self, model: CausalModel, config: Config, num_sequences: int, sequence_tokens: int) -> None:
        self._model, self._dtype = model, config.model.dtype
        self.spec = config.cache_spec()
        blocks = -(-sequence_tokens // self.spec.block_size)
        # A fixed shuffle: consecutive blocks of a sequence lie apart, as they do in an engine that has run for a while.
        self._tables = np.random.default_rng(0).permutation(num_sequences * blocks).reshape(num_sequences, blocks)
        scales = load_static_scales(config, 0, model.revision)
        caches: RunnerCache | CacheController
        if config.cache.manager == "v0":
            caches = RunnerCache(self.spec, self._tables.size, config.device.type, scales)
        else:
            caches = CacheController(config, 0, config.device.type, scales)
            caches.initialize_kv_cache(self._tables.size)
        self._layers = [caches.layer_cache(layer) for layer in self.spec.group("main").layers]

    @property
    def storage_dtype(self) -> str:
        """dtype of the first layer's tensor."""
        return str(self._layers[0].key.dtype).removeprefix("paddle.")

    @paddle.no_grad()
    def step(self, tokens: Sequence[Sequence[int]], contexts: Sequence[int], all_rows: bool) -> FloatRows:
        """Compute new tokens of the first len(tokens) sequences.

        Args:
            tokens: each sequence's new tokens, at least one.
            contexts: how many of its tokens are in the cache already.
            all_rows: logits of every token, or of each sequence's last only.

        Returns:
            float32 [rows, vocab_size].
        """
        lengths = [len(new) for new in tokens]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(contexts, lengths, strict=True)])
        rows, size = np.repeat(np.arange(len(tokens)), lengths), self.spec.block_size
        slots = self._tables[rows, positions // size] * size + positions % size
        batch = AttentionBatch.from_numpy(
            self._tables[: len(tokens)].astype(np.int32), starts, np.asarray(contexts, np.int32), slots.astype(np.int64)
        )
        attend = self._model.paged_attend(self._layers, batch, self._dtype)
        flat = np.concatenate([np.asarray(new, np.int64) for new in tokens])
        hidden = self._model.forward(paddle.to_tensor(flat), paddle.to_tensor(positions.astype(np.int64)), attend)
        wanted = hidden if all_rows else hidden[paddle.to_tensor(starts[1:].astype(np.int64) - 1)]
        logits: FloatRows = self._model.logits(wanted).numpy()
        if not np.isfinite(logits).all():
            raise InvariantError(f"{self.spec.storage.name}: logits are not finite; the step that made them is wrong")
        return logits


def evaluate(
    model: CausalModel,
    configs: Mapping[str, Config],
    text: EvaluationText,
    on_progress: Callable[[str, int], None] | None = None,
) -> list[StorageQuality]:
    """Read and continue a text over each type's cache.

    Args:
        model: the model of all configs.
        configs: type's name -> config with that type; "none" is among them and is what the others are compared with.
        text: what to read.
        on_progress: called with (type, tokens that it computed since).

    Returns:
        One row for each config, "none" first.

    Raises:
        ConfigError: "none" is missing, a window is longer than the model's context, or as PagedModel.
    """
    if REFERENCE not in configs:
        raise ConfigError(f"evaluation compares with {REFERENCE!r}; add its config")
    report = on_progress or (lambda name, tokens: None)
    names = [REFERENCE, *(name for name in configs if name != REFERENCE)]
    for name in names:
        _check_lengths(configs[name], text)
    window_tokens = max(len(window) for window in text.windows)
    readers = {name: PagedModel(model, configs[name], 1, window_tokens) for name in names}
    tallies = {name: _Tally() for name in names}
    for window in text.windows:
        _read(window, readers, tallies, report)
    continued: dict[str, list[list[int]]] = {}
    prompt_tokens = max(len(prompt) for prompt in text.prompts)
    for name in names:
        writer = PagedModel(model, configs[name], len(text.prompts), prompt_tokens + text.continuation_tokens)
        continued[name] = _continue(writer, text, functools.partial(report, name))
    return [
        tallies[name].row(readers[name], text, _mean_common_prefix(continued[name], continued[REFERENCE]))
        for name in names
    ]


class _Tally:
    """Sums over the positions that one type has predicted."""

    def __init__(self) -> None:
        self.tokens = self.agreeing = 0
        self.loss = self.difference_sum = self.difference_max = 0.0
        self.logits = 0

    def add(self, logits: FloatRows, targets: npt.NDArray[np.int64], reference: FloatRows) -> None:
        """logits, reference: [n, vocab]; targets [n]: the tokens that follow."""
        top = logits.max(axis=-1)
        log_sum = np.log(np.exp(logits - top[:, None]).sum(axis=-1, dtype=np.float64)) + top
        self.loss += float((log_sum - logits[np.arange(len(targets)), targets]).sum())
        self.tokens += len(targets)
        self.agreeing += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        if logits is not reference:
            difference = np.abs(logits - reference)
            self.difference_max = max(self.difference_max, float(difference.max()))
            self.difference_sum += float(difference.sum(dtype=np.float64))
        self.logits += logits.size

    def row(self, reader: PagedModel, text: EvaluationText, common_prefix_tokens: float) -> StorageQuality:
        """What the sums say."""
        return StorageQuality(
            kv_cache_quant_type=reader.spec.storage.name,
            storage_dtype=reader.storage_dtype,
            bytes_per_token=reader.spec.block_bytes / reader.spec.block_size,
            perplexity=math.exp(min(self.loss / self.tokens, _LARGEST_LOSS)),
            greedy_agreement=self.agreeing / self.tokens,
            common_prefix_tokens=common_prefix_tokens,
            continuation_tokens=text.continuation_tokens,
            max_logit_difference=self.difference_max,
            mean_logit_difference=self.difference_sum / self.logits,
            tokens=self.tokens,
        )


def _read(
    window: tuple[int, ...],
    readers: Mapping[str, PagedModel],
    tallies: Mapping[str, _Tally],
    report: Callable[[str, int], None],
) -> None:
    """Teacher-force one window through every type's cache, chunk by chunk. The last token is only predicted."""
    inputs, targets = window[:-1], np.asarray(window[1:], np.int64)
    for start in range(0, len(inputs), _CHUNK_TOKENS):
        chunk = inputs[start : start + _CHUNK_TOKENS]
        reference: FloatRows | None = None
        for name, reader in readers.items():
            logits = reader.step([chunk], [start], all_rows=True)
            reference = logits if reference is None else reference  # the first one is the unquantised cache
            tallies[name].add(logits, targets[start : start + len(chunk)], reference)
            report(name, len(chunk) + (start + len(chunk) == len(inputs)))


def _continue(writer: PagedModel, text: EvaluationText, report: Callable[[int], None]) -> list[list[int]]:
    """Greedy continuations of all prompts, in one batch. They do not stop at a stop token."""
    new: list[Sequence[int]] = list(text.prompts)
    contexts = [0] * len(new)
    outputs: list[list[int]] = [[] for _ in new]
    for _ in range(text.continuation_tokens):
        logits = writer.step(new, contexts, all_rows=False)
        contexts = [context + len(tokens) for context, tokens in zip(contexts, new, strict=True)]
        report(sum(len(tokens) for tokens in new))
        new = [[int(token)] for token in logits.argmax(-1)]
        for output, (token,) in zip(outputs, new, strict=True):
            output.append(token)
    report(len(new) if text.continuation_tokens else 0)
    return outputs


def _mean_common_prefix(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    lengths = []
    for ours, theirs in zip(outputs, reference, strict=True):
        differs = np.flatnonzero(np.asarray(ours) != np.asarray(theirs))
        lengths.append(int(differs[0]) if len(differs) else len(ours))
    return float(np.mean(lengths))


def _check_lengths(config: Config, text: EvaluationText) -> None:
    longest = max(
        max(len(window) for window in text.windows),
        max(len(prompt) for prompt in text.prompts) + text.continuation_tokens,
    )
    if longest > config.model.max_context:
        raise ConfigError(
            f"evaluation holds {longest} tokens of a sequence at once, model.max_context is "
            f"{config.model.max_context}; use shorter windows (--context) or continuations (--continue)"
        )
