"""The engine over every kind of cache, with a tiny random model: exactness, identity of all paths, shared prefixes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.engine import PROMPTS, TINY, tiny_config

from fastkv import Config, RequestError
from fastkv.core.messages import SamplingParams, encode
from fastkv.engine.llm import LLM
from fastkv.engine.model import load_model
from fastkv.engine.recompute import greedy_generate
from fastkv.engine.report import Generation
from fastkv.engine.transport import ProcessWorker
from fastkv.errors import ConfigError, WorkerError

TYPES = ["none", "int8", "int8_zp", "float8_e4m3fn", "float8_e4m3fn_zp", "block_wise_fp8", "int4_zp", "int8_token"]


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


STORAGES = [(dtype, "none") for dtype in ("float32", "float16", "bfloat16")] + [
    ("float32", "int8"),
    ("float32", "block_wise_fp8"),
]


@pytest.mark.parametrize(("dtype", "quant_type"), STORAGES)
def test_engine_v0_and_v1_inline_and_process_generate_identical_tokens(dtype: str, quant_type: str) -> None:
    found = []
    for manager in ("v0", "v1"):
        cache = {"kv_cache_quant_type": quant_type, "manager": manager}
        for worker in ("inline", "process"):
            generation = generate(tiny_config(model={"dtype": dtype}, cache=cache), PROMPTS, worker)
            assert generation.report.device_cache_bytes > 0
            found.append(tokens(generation))
    assert found == [found[0]] * 4


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


@pytest.mark.parametrize("manager", ["v0", "v1"])
@pytest.mark.parametrize("quant_type", TYPES)
def test_engine_recycled_blocks_never_leak_their_old_content(quant_type: str, manager: str) -> None:
    """Blocks are poisoned before each prompt, with NaN where the type has one; a request reads only what it wrote."""
    config = tiny_config(cache={"block_size": 4, "kv_cache_quant_type": quant_type, "manager": manager})
    with LLM(config) as llm:
        caches = llm._transport._worker.caches  # type: ignore[attr-defined]
        tensors = caches.flat_list() if manager == "v0" else list(caches.get_kv_caches().values())

        def alone(prompt: list[int]) -> list[list[int]]:
            llm.manager.reset()
            return tokens(llm.generate([prompt], max_tokens=12))

        for prompt in PROMPTS:
            caches.reset_cache()
            clean = alone(prompt)
            for tensor in tensors:
                if tensor.dtype == paddle.uint8:
                    tensor.fill_(0x7F)  # fp8's NaN
                else:
                    paddle.assign(np.full(tensor.shape, np.nan, np.float32), tensor)
            assert alone(prompt) == clean


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
        ([1], {"max_tokens": 0}, "whole number of at least 1"),
        ([1], {"max_tokens": 1.5}, "whole number of at least 1"),
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


@pytest.mark.parametrize("after_steps", [0, 3])
def test_engine_killed_worker_is_an_error_that_says_so(after_steps: int) -> None:
    with LLM(tiny_config(), "process") as llm:
        assert isinstance(llm._transport, ProcessWorker)
        worker, steps = llm._transport._process, []

        def kill_later(*progress: int) -> None:
            steps.append(progress)
            if len(steps) == after_steps:
                worker.kill()

        if not after_steps:
            worker.kill()
        for _ in range(2):  # and it stays dead
            with pytest.raises(WorkerError, match="killed by signal 9"):
                llm.generate(PROMPTS, on_progress=kill_later)
            llm.manager.check_integrity()
            assert llm.manager.stats().held == 0


@pytest.mark.parametrize("worker", ["inline", "process"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, WorkerError])
def test_engine_after_a_step_that_did_not_return_generates_as_before(
    monkeypatch: pytest.MonkeyPatch, worker: str, error: type[BaseException]
) -> None:
    """Interrupted or failed at the Nth step, for every N: the next call neither meets the old step nor its answer."""
    with LLM(tiny_config(), worker) as llm:
        want = tokens(llm.generate(PROMPTS[:3], max_tokens=4))
        real = llm._transport.call
        for fail_at in range(1, 5):
            calls = 0

            def failing(message: Any, fail_at: int = fail_at) -> Any:
                nonlocal calls
                calls += 1
                if calls == fail_at:
                    if isinstance(llm._transport, ProcessWorker):
                        llm._transport._connection.send_bytes(encode(message))  # its answer is never read
                    raise error("the step is gone")
                return real(message)

            monkeypatch.setattr(llm._transport, "call", failing)
            with pytest.raises(error, match="the step is gone"):
                llm.generate(PROMPTS[:3], max_tokens=4)
            monkeypatch.setattr(llm._transport, "call", real)
            llm.manager.check_integrity()
            assert llm.manager.stats().held == 0
            assert tokens(llm.generate(PROMPTS[:3], max_tokens=4)) == want


def test_engine_called_from_several_threads_serves_them_in_turn() -> None:
    """They shared the steps of one batch: "3 results for a step of 2 requests", and now and then wrong tokens."""
    with LLM(tiny_config()) as llm, ThreadPoolExecutor(3) as pool:
        want = tokens(llm.generate(PROMPTS[:3], max_tokens=4))
        calls = [pool.submit(llm.generate, PROMPTS[:3], max_tokens=4) for _ in range(12)]
        assert [tokens(call.result()) for call in calls] == [want] * 12


def test_engine_stream_without_a_tokenizer_queues_nothing() -> None:
    with LLM(tiny_config()) as llm:
        with pytest.raises(ConfigError, match="no tokenizer"):
            llm.generate([[1, 2, 3]], on_text=lambda index, text: None)
        assert llm.generate([[1, 2, 3, 4]], max_tokens=1).report.prefill_tokens == 4


@pytest.mark.parametrize("prompts", ["one text", ([1, 2, i] for i in range(2)), None, 5])
def test_engine_prompts_that_are_no_list_are_refused_before_anything_is_computed(prompts: Any) -> None:
    """A generator was computed to the end, and then failed for want of a second pass over it."""
    with LLM(tiny_config()) as llm:
        with pytest.raises(RequestError, match=f"prompts is a {type(prompts).__name__}; give a list"):
            llm.generate(prompts)
        assert llm.manager.stats().matches == 0


def test_engine_hits_are_of_the_prompt_even_when_requests_restart() -> None:
    config = tiny_config(cache={"block_size": 1, "num_device_blocks": 26}, scheduler={"max_batch_size": 8})
    report = generate(config, [[i, 2, 3] for i in range(8)], max_tokens=20).report
    assert report.prefix_hit_tokens <= report.prompt_tokens == 24


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"tensor_parallel_size": 2}}, "runs a model on one rank"),
        ({"model": {"v_head_dim": 4}}, "v_head_dim is 4, the weights have 8"),
    ],
)
def test_engine_config_that_could_never_run_is_refused_at_start(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_config(**sections))


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
