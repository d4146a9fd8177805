"""Evaluation of storage types on tiny random models: against recomputation, and type against type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.attention_kinds import VOCAB_SIZE, kind_config

from fastkv import Config
from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind, ScaleKind
from fastkv.engine import mla, recompute
from fastkv.engine.evaluation import EvaluationText, PagedModel, StorageQuality, evaluate
from fastkv.engine.mla import MlaModel
from fastkv.engine.model import CausalModel, load_model
from fastkv.errors import ConfigError

TOKENS = np.random.default_rng(8).integers(0, VOCAB_SIZE, 331).tolist()
TEXT = EvaluationText.cut(TOKENS, context_tokens=200, num_prompts=3, prompt_tokens=9, continuation_tokens=12)


def configs_of(kind: str, manager: str = "v1", **cache: Any) -> dict[str, Config]:
    names = [row.name for row in STORAGE_DTYPES.values() if row.is_legal_with(AttentionKind(kind))]
    return {name: kind_config(kind, cache={"kv_cache_quant_type": name, "manager": manager, **cache}) for name in names}


def recomputed_logits(model: Any, tokens: list[int]) -> np.ndarray:
    return (mla.recompute_logits if isinstance(model, MlaModel) else recompute.logits)(model, tokens)


@pytest.fixture(scope="module")
def gqa_model() -> CausalModel:
    return load_model(kind_config("gqa"))


@pytest.fixture(scope="module")
def gqa_rows(gqa_model: CausalModel) -> dict[str, StorageQuality]:
    return {row.kv_cache_quant_type: row for row in evaluate(gqa_model, configs_of("gqa"), TEXT)}


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_evaluation_unquantised_perplexity_is_the_recomputed_one(kind: str) -> None:
    """Windows longer than a chunk: the cache carries what earlier chunks left."""
    config = kind_config(kind)
    model = load_model(config)
    (row,) = evaluate(model, {"none": config}, TEXT)
    losses = []
    for window in TEXT.windows:
        logits = recomputed_logits(model, list(window))[:-1].astype(np.float64)
        log_sum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        losses.append(log_sum - logits[np.arange(len(window) - 1), window[1:]])
    assert row.perplexity == pytest.approx(np.exp(np.concatenate(losses).mean()), rel=1e-4)
    assert row.tokens == len(TOKENS) - len(TEXT.windows)


def test_evaluation_reference_agrees_with_itself(gqa_rows: dict[str, StorageQuality]) -> None:
    row = gqa_rows["none"]
    assert (row.greedy_agreement, row.max_logit_difference, row.mean_logit_difference) == (1.0, 0.0, 0.0)
    assert row.common_prefix_tokens == row.continuation_tokens == 12


def test_evaluation_rows_say_what_is_stored(gqa_rows: dict[str, StorageQuality]) -> None:
    assert list(gqa_rows) == [row.name for row in STORAGE_DTYPES.values()]
    # 2 layers x keys and values x 2 heads x 8 channels, in float32 when not quantised; dynamic types: 2 x 2 x 2 scales
    expected = {
        storage.name: 64 * (storage.bits or 32) / 8 + 8 * 4 * (storage.scales is ScaleKind.DYNAMIC)
        for storage in STORAGE_DTYPES.values()
    }
    assert {name: row.bytes_per_token for name, row in gqa_rows.items()} == expected
    dtypes = {name: row.storage_dtype for name, row in gqa_rows.items()}
    assert dtypes == dict.fromkeys(gqa_rows, "uint8") | {"none": "float32"}


def test_evaluation_finer_types_stay_closer_to_the_reference(gqa_rows: dict[str, StorageQuality]) -> None:
    """int8 has 256 levels, fp8 3 bits of mantissa, int4 16 levels."""
    off = {name: row.mean_logit_difference for name, row in gqa_rows.items()}
    # Not int8_zp < int8: its ranges fit the calibrated text tightly on both sides, so that new text is clipped more.
    for coarser in ("float8_e4m3fn", "float8_e4m3fn_zp", "block_wise_fp8"):
        assert 0 < off["int8"] < off[coarser] < off["int4_zp"]
    assert 0 < off["int8_zp"] < off["float8_e4m3fn_zp"]
    same = {name: row.greedy_agreement for name, row in gqa_rows.items()}
    assert 0.9 < same["int8"] <= 1
    assert same["int4_zp"] < same["int8"]
    for row in gqa_rows.values():
        assert row.mean_logit_difference <= row.max_logit_difference
        assert 0 <= row.common_prefix_tokens <= row.continuation_tokens


def test_evaluation_agreement_is_the_share_of_equal_argmax(gqa_model: CausalModel) -> None:
    """The same by hand, each window in one step instead of chunks."""
    configs = configs_of("gqa")
    pair = {name: configs[name] for name in ("none", "int4_zp")}
    row = evaluate(gqa_model, pair, TEXT)[1]
    equal, differences = [], []
    for window in TEXT.windows:
        logits = [
            PagedModel(gqa_model, config, 1, len(window)).step([window], [0], all_rows=True)[:-1]
            for config in pair.values()
        ]
        equal.append(logits[0].argmax(-1) == logits[1].argmax(-1))
        differences.append(np.abs(logits[0] - logits[1]).ravel())
    assert row.greedy_agreement == pytest.approx(np.concatenate(equal).mean(), abs=0.02)
    assert row.mean_logit_difference == pytest.approx(np.concatenate(differences).mean(), rel=0.02)


def test_evaluation_v0_and_v1_give_the_same_rows(gqa_model: CausalModel, gqa_rows: dict[str, StorageQuality]) -> None:
    rows = evaluate(gqa_model, configs_of("gqa", "v0"), TEXT)
    assert rows == list(gqa_rows.values())


def test_evaluation_of_latents_compares_fp8() -> None:
    rows = evaluate(load_model(kind_config("mla")), configs_of("mla"), TEXT)
    assert [row.kv_cache_quant_type for row in rows] == ["none", "float8_e4m3fn"]
    assert rows[0].bytes_per_token == 4 * rows[1].bytes_per_token == 2 * 24 * 4
    assert 0 < rows[1].mean_logit_difference < 1
    assert rows[1].greedy_agreement > 0.5


def test_paged_model_batch_continues_as_recomputation_does(gqa_model: CausalModel) -> None:
    """Sequences of unlike lengths share a batch; each owns scattered blocks."""
    prompts = [TOKENS[:1], TOKENS[10:27], TOKENS[40:44]]
    paged = PagedModel(gqa_model, kind_config("gqa", cache={"block_size": 3}), len(prompts), 40)
    new, contexts, outputs = prompts, [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]
    for _ in range(6):
        best = paged.step(new, contexts, all_rows=False).argmax(-1)
        contexts = [c + len(n) for c, n in zip(contexts, new, strict=True)]
        new = [[int(token)] for token in best]
        for output, token in zip(outputs, best, strict=True):
            output.append(int(token))
    assert outputs == [recompute.greedy_generate(gqa_model, prompt, 6) for prompt in prompts]  # type: ignore[arg-type]


def test_evaluation_progress_adds_up_to_the_work(gqa_model: CausalModel) -> None:
    configs = {name: config for name, config in configs_of("gqa").items() if name in ("none", "int8")}
    seen = dict.fromkeys(configs, 0)

    def count(name: str, tokens: int) -> None:
        assert tokens > 0
        seen[name] += tokens

    evaluate(gqa_model, configs, TEXT, on_progress=count)
    assert seen == dict.fromkeys(configs, TEXT.work)


def test_evaluation_text_is_cut_into_windows_and_prompts() -> None:
    text = EvaluationText.cut(range(21), context_tokens=10, num_prompts=3, prompt_tokens=4, continuation_tokens=5)
    assert text.windows == (tuple(range(10)), tuple(range(10, 20)))  # the last token alone predicts nothing
    assert text.prompts == ((0, 1, 2, 3), (8, 9, 10, 11), (17, 18, 19, 20))
    assert (text.num_tokens, text.work) == (20, 20 + 3 * 4 + 3 * 5)
    short = EvaluationText.cut([5, 6, 7], context_tokens=10, num_prompts=2, prompt_tokens=32)
    assert (short.windows, short.prompts) == (((5, 6, 7),), ((5, 6, 7), (5, 6, 7)))


def test_evaluation_that_cannot_be_is_refused(gqa_model: CausalModel) -> None:
    with pytest.raises(ConfigError, match="1 tokens in windows of 8.*at least 2"):
        EvaluationText.cut([3], context_tokens=8)
    with pytest.raises(ConfigError, match="windows of 1"):
        EvaluationText.cut([3, 4], context_tokens=1)
    with pytest.raises(ConfigError, match="compares with 'none'"):
        evaluate(gqa_model, {"int8": configs_of("gqa")["int8"]}, TEXT)
    longer = EvaluationText.cut(TOKENS, context_tokens=300)
    with pytest.raises(ConfigError, match=r"300 tokens.*max_context is 256.*--context"):
        evaluate(gqa_model, {"none": kind_config("gqa")}, longer)
    no_scales = kind_config("gqa", cache={"kv_cache_quant_type": "int8", "scales_file": None})
    with pytest.raises(ConfigError, match="needs static scales"):
        evaluate(gqa_model, {"none": kind_config("gqa"), "int8": no_scales}, TEXT)
