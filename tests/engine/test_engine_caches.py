"""The engine over every kind of cache, with a tiny random model: exactness, identity of all paths, shared prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from helpers.engine import PROMPTS, TINY, tiny_config

from fastkv import Config, RequestError
from fastkv.core.messages import SamplingParams
from fastkv.engine.llm import LLM, Generation
from fastkv.engine.model import load_model
from fastkv.engine.recompute import greedy_generate
from fastkv.engine.transport import ProcessWorker
from fastkv.errors import ConfigError, WorkerError

TYPES = ["none", "int8", "int8_zp", "float8_e4m3fn", "float8_e4m3fn_zp", "block_wise_fp8", "int4_zp"]


def generate(config: Config, prompts: list[list[int]], worker: str = "inline", **options: Any) -> Generation:
    with LLM(config, worker) as llm:
        generation = llm.generate(prompts, **{"max_tokens": 12, **options})
        llm.manager.check_integrity()
        assert llm.manager.stats().held == 0
    return generation


def tokens(generation: Generation) -> list[list[int]]:
    return [output.token_ids for output in generation.outputs]


@pytest.fixture(scope="module")
def recomputed() -> list[list[int]]:
    model = load_model(tiny_config())
    return [greedy_generate(model, prompt, 12) for prompt in PROMPTS]


@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("max_batch_tokens", [4, 16, 512])
def test_engine_unquantised_equals_full_recompute(
    recomputed: list[list[int]], block_size: int, max_batch_tokens: int
) -> None:
    config = tiny_config(
        cache={"block_size": block_size, "num_device_blocks": 700 // block_size},
        scheduler={"max_batch_size": 4, "max_batch_tokens": max_batch_tokens},
    )
    assert tokens(generate(config, PROMPTS)) == recomputed


@pytest.mark.parametrize("quant_type", TYPES)
def test_engine_v0_and_v1_generate_identical_tokens(quant_type: str) -> None:
    results = [
        tokens(generate(tiny_config(cache={"kv_cache_quant_type": quant_type, "manager": manager}), PROMPTS))
        for manager in ("v0", "v1")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(("quant_type", "manager"), [("none", "v0"), ("int8", "v1"), ("block_wise_fp8", "v1")])
def test_engine_inline_and_process_generate_identical_tokens(quant_type: str, manager: str) -> None:
    config = tiny_config(cache={"kv_cache_quant_type": quant_type, "manager": manager})
    inline, process = generate(config, PROMPTS), generate(config, PROMPTS, "process")
    assert tokens(inline) == tokens(process)
    assert inline.report.device_cache_bytes == process.report.device_cache_bytes > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_engine_half_precision_storage_stays_close_to_full_precision(recomputed: list[list[int]], dtype: str) -> None:
    generation = generate(tiny_config(model={"dtype": dtype}), PROMPTS)
    assert generation.report.storage_dtype == dtype
    first = [got[0] == want[0] for got, want in zip(tokens(generation), recomputed, strict=True)]
    assert sum(first) >= len(first) - 1


@pytest.mark.parametrize("quant_type", TYPES)
def test_engine_report_bytes_are_the_specs(quant_type: str) -> None:
    config = tiny_config(cache={"kv_cache_quant_type": quant_type, "num_host_blocks": 3}, speculation={"num_layers": 1})
    report, plan = generate(config, PROMPTS[:1]).report, config.capacity_plan()
    assert report.storage_dtype == config.cache_spec().cache_dtype
    assert report.device_cache_bytes == plan.group_bytes("main")
    assert report.mtp_cache_bytes == plan.group_bytes("mtp")
    assert report.host_cache_bytes == plan.host_bytes > 0


@pytest.mark.parametrize("quant_type", ["none", "int8", "block_wise_fp8"])
def test_engine_shared_prefix_is_computed_once_and_changes_nothing(quant_type: str) -> None:
    shared = list(range(1, 41))
    prompts = [[*shared, 50 + i, 60, 61] for i in range(5)]
    cache = {"kv_cache_quant_type": quant_type, "block_size": 4}
    cached = generate(tiny_config(cache=cache), prompts)
    plain = generate(tiny_config(cache={**cache, "enable_prefix_caching": False}), prompts)
    assert tokens(cached) == tokens(plain)
    assert cached.report.prefix_hit_tokens == 4 * 40
    assert cached.report.prefill_tokens == 40 + 5 * 3
    assert plain.report.prefix_hit_tokens == 0
    assert plain.report.prefill_tokens == 5 * 43


def test_engine_second_call_finds_the_first_calls_blocks() -> None:
    with LLM(tiny_config(cache={"block_size": 4})) as llm:
        first = llm.generate([list(range(1, 9))], max_tokens=6)
        second = llm.generate([list(range(1, 9))], max_tokens=6)
    assert tokens(first) == tokens(second)
    # A full hit still computes one token: of 8 prompt tokens 4 are taken from the cache.
    assert second.report.prefix_hit_tokens == 4


def test_engine_short_of_blocks_preempts_and_loses_nothing(recomputed: list[list[int]]) -> None:
    config = tiny_config(
        cache={"block_size": 4, "num_device_blocks": 20}, scheduler={"max_batch_size": 8, "max_batch_tokens": 32}
    )
    with LLM(config) as llm:
        generation = llm.generate(PROMPTS, max_tokens=12)
        llm.manager.check_integrity()
    assert tokens(generation) == recomputed
    assert generation.report.peak_blocks <= 20


def test_engine_recycled_blocks_never_leak_their_old_content(recomputed: list[list[int]]) -> None:
    """Blocks are poisoned with NaN before each prompt; what a new request reads is only what it wrote."""
    with LLM(tiny_config(cache={"block_size": 4})) as llm:
        for prompt, want in zip(PROMPTS, recomputed, strict=True):
            llm.manager.reset()
            caches = llm._transport._worker.caches  # type: ignore[attr-defined]
            for tensor in caches.get_kv_caches().values():
                paddle.assign(np.full(tensor.shape, np.nan, dtype=np.float32), tensor)
            assert tokens(llm.generate([prompt], max_tokens=12)) == [want]


def test_engine_sampling_depends_on_the_seed_and_not_on_the_batch() -> None:
    config = tiny_config()
    sampling = SamplingParams(temperature=1.5, seed=7)
    batched = tokens(generate(config, PROMPTS, sampling=sampling))
    alone = [tokens(generate(config, [prompt], sampling=sampling))[0] for prompt in PROMPTS[:3]]
    other = tokens(generate(config, PROMPTS, sampling=SamplingParams(temperature=1.5, seed=8)))
    assert batched[:3] == alone
    assert batched != other


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1] * 512, {}, "context holds 512"),
        ([1] * 200, {}, "do not fit the cache of 160 tokens"),
        ([1, 2, TINY["vocab_size"]], {}, "outside the vocabulary"),
        ([1, -2], {}, "-2"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([1], {"sampling": SamplingParams(temperature=-1.0)}, "temperature"),
        ("text", {}, "no tokenizer"),
    ],
)
def test_engine_bad_request_is_refused_before_anything_runs(prompt: Any, options: dict[str, Any], message: str) -> None:
    with LLM(tiny_config(cache={"block_size": 4, "num_device_blocks": 40})) as llm:
        before = llm.manager.stats()
        with pytest.raises((RequestError, ConfigError), match=message):
            llm.generate([[1, 2, 3], prompt], **options)
        assert llm.manager.stats() == before
        assert len(llm.generate([[1, 2, 3]], max_tokens=2).outputs[0].token_ids) == 2


def test_engine_killed_worker_is_an_error_that_says_so() -> None:
    with LLM(tiny_config(), "process") as llm:
        assert isinstance(llm._transport, ProcessWorker)
        llm._transport._process.kill()
        with pytest.raises(WorkerError, match="killed by signal 9"):
            llm.generate(PROMPTS)
        llm.manager.check_integrity()
        assert llm.manager.stats().held == 0


def test_engine_worker_that_cannot_start_reports_its_own_error() -> None:
    config = tiny_config(model={"weights": "nowhere.gguf"})
    with pytest.raises(ConfigError, match=r"nowhere\.gguf"):
        LLM(config, "process")


def test_engine_on_progress_and_on_text_see_every_token() -> None:
    seen: list[tuple[int, int]] = []
    with LLM(tiny_config()) as llm:
        generation = llm.generate(PROMPTS, max_tokens=3, on_progress=lambda done, n: seen.append((done, n)))
    assert seen[-1] == (len(PROMPTS), sum(len(o.token_ids) for o in generation.outputs))
    assert np.all(np.diff([n for _, n in seen]) >= 0)
