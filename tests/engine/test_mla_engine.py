"""Every attention kind over every cache type, end to end: the engine in v0 and v1, inline and in a process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from helpers.attention_kinds import PROMPTS, VOCAB_SIZE, kind_config, kind_data

from fastkv import CacheController, Config, RunnerCache, parse_config
from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind, StorageDtype
from fastkv.engine.llm import LLM
from fastkv.engine.mla import MlaModel, recompute_greedy
from fastkv.engine.model import load_model
from fastkv.engine.report import Generation
from fastkv.errors import ConfigError

MAX_TOKENS = 10
PAIRS = [(row, kind) for row in STORAGE_DTYPES.values() for kind in AttentionKind]
LEGAL = [pair for pair in PAIRS if pair[0].is_legal_with(pair[1])]
ILLEGAL = [pair for pair in PAIRS if not pair[0].is_legal_with(pair[1])]


def pair_id(value: StorageDtype | AttentionKind) -> str:
    return value.name if isinstance(value, StorageDtype) else value.value


def generate(config: Config, worker: str = "inline", prompts: list[list[int]] = PROMPTS) -> Generation:
    with LLM(config, worker) as llm:
        generation = llm.generate(prompts, max_tokens=MAX_TOKENS)
        llm.manager.check_integrity()
    return generation


def tokens(generation: Generation) -> list[list[int]]:
    return [output.token_ids for output in generation.outputs]


@pytest.fixture(scope="module")
def recomputed() -> list[list[int]]:
    model = load_model(kind_config("mla"))
    assert isinstance(model, MlaModel)
    return [recompute_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("max_batch_tokens", [4, 64])
def test_mla_unquantised_equals_full_recompute_without_absorption(
    recomputed: list[list[int]], block_size: int, max_batch_tokens: int
) -> None:
    config = kind_config(
        "mla",
        cache={"block_size": block_size, "num_device_blocks": 300 // block_size},
        scheduler={"max_batch_size": 4, "max_batch_tokens": max_batch_tokens},
    )
    assert tokens(generate(config)) == recomputed


@pytest.mark.parametrize(
    ("dtype", "quant_type"),
    [("float32", "none"), ("float16", "none"), ("bfloat16", "none"), ("float32", "fp8"), ("bfloat16", "fp8")],
)
def test_mla_v0_and_v1_inline_and_process_generate_identical_tokens(
    recomputed: list[list[int]], dtype: str, quant_type: str
) -> None:
    results, stored = [], set()
    in_process = "v0" if quant_type == "fp8" else "v1"  # starting a process takes seconds: one for each type
    for manager, worker in (("v0", "inline"), ("v1", "inline"), (in_process, "process")):
        config = kind_config(
            "mla", model={"dtype": dtype}, cache={"kv_cache_quant_type": quant_type, "manager": manager}
        )
        generation = generate(config, worker)
        results.append(tokens(generation))
        stored.add((generation.report.storage_dtype, generation.report.device_cache_bytes))
        assert generation.report.device_cache_bytes == config.capacity_plan().device_bytes
    assert results[0] == results[1] == results[2]
    assert {dtype_name for dtype_name, _ in stored} == {dtype if quant_type == "none" else "uint8"}
    assert len(stored) == 1
    agreeing = sum(
        got == want for g, w in zip(results[0], recomputed, strict=True) for got, want in zip(g, w, strict=True)
    )
    assert agreeing >= (0.9 if quant_type == "none" else 0.5) * MAX_TOKENS * len(PROMPTS)


@pytest.mark.parametrize(("storage", "kind"), LEGAL, ids=pair_id)
def test_pair_that_the_table_allows_runs_alike_in_v0_and_v1(storage: StorageDtype, kind: AttentionKind) -> None:
    """The table is the promise: what it lists runs, in both managers, to the same tokens."""
    configs = [
        kind_config(kind.value, cache={"kv_cache_quant_type": storage.name, "manager": manager})
        for manager in ("v0", "v1")
    ]
    if kind is AttentionKind.DSA:
        check_same_allocation(*configs)
        return
    generations = [generate(config) for config in configs]
    assert tokens(generations[0]) == tokens(generations[1])
    assert all(0 <= token < VOCAB_SIZE for output in tokens(generations[0]) for token in output)
    for generation, config in zip(generations, configs, strict=True):
        assert generation.report.storage_dtype == config.cache_spec().cache_dtype
        assert generation.report.device_cache_bytes == config.capacity_plan().device_bytes > 0


@pytest.mark.parametrize(("storage", "kind"), ILLEGAL, ids=pair_id)
@pytest.mark.parametrize("manager", ["v0", "v1"])
def test_pair_that_the_table_leaves_out_is_refused_at_start(
    storage: StorageDtype, kind: AttentionKind, manager: str
) -> None:
    data = kind_data(kind.value, cache={"kv_cache_quant_type": storage.name, "manager": manager})
    with pytest.raises(ConfigError, match=f"{storage.name} is not supported with {kind.value} attention; allowed"):
        parse_config(data)


def test_every_pair_is_tested_once() -> None:
    assert len(LEGAL) + len(ILLEGAL) == len(STORAGE_DTYPES) * len(AttentionKind)
    assert {kind for _, kind in LEGAL} == set(AttentionKind)
    assert {row.name for row, _ in LEGAL} == {row.name for row in STORAGE_DTYPES.values()}


def check_same_allocation(v0: Config, v1: Config) -> None:
    """DSA caches: the same tensors in both managers, and a model over them refused."""
    spec, num_blocks = v0.cache_spec(), v0.capacity_plan().num_device_blocks
    runner, controller = RunnerCache(spec, num_blocks), CacheController(v1)
    controller.initialize_all()
    flat, named = runner.flat_list(), list(controller.get_kv_caches().values())
    expected = [role.shape(num_blocks) for _, _, role in spec.iter_roles()]
    for tensors in (flat, named):
        assert [tuple(t.shape) for t in tensors] == expected
        assert {t.dtype for t in tensors} == {paddle.uint8}
        assert sum(t.numel().item() for t in tensors) == v0.capacity_plan().device_bytes
    for caches in (runner, controller):
        with pytest.raises(ConfigError, match="no attention op for their format"):
            caches.layer_cache(0)


@pytest.mark.parametrize(("manager", "worker"), [("v0", "inline"), ("v1", "inline"), ("v1", "process")])
def test_dsa_model_is_refused_at_start(manager: str, worker: str) -> None:
    with pytest.raises(ConfigError, match="dsa: fastkv allocates.*no attention op"):
        LLM(kind_config("dsa", cache={"manager": manager}), worker)


@pytest.mark.parametrize("quant_type", ["none", "fp8"])
def test_mla_shared_prefix_is_computed_once_and_changes_nothing(quant_type: str) -> None:
    shared = list(range(1, 25))
    prompts = [[*shared, 50 + i, 60] for i in range(3)]
    cached = generate(kind_config("mla", cache={"kv_cache_quant_type": quant_type}), prompts=prompts)
    plain_cache = {"kv_cache_quant_type": quant_type, "enable_prefix_caching": False}
    plain = generate(kind_config("mla", cache=plain_cache), prompts=prompts)
    assert tokens(cached) == tokens(plain)
    assert cached.report.prefix_hit_tokens == 2 * 24
    assert plain.report.prefix_hit_tokens == 0


@pytest.mark.parametrize("quant_type", ["none", "fp8"])
def test_mla_recycled_blocks_never_leak_their_old_content(quant_type: str) -> None:
    """Caches are filled with NaN (0xff bytes are one in every stored type) before each prompt."""
    config = kind_config("mla", cache={"kv_cache_quant_type": quant_type, "num_device_blocks": 12})
    want = [tokens(generate(config, prompts=[prompt])) for prompt in PROMPTS]
    with LLM(config) as llm:
        for prompt, expected in zip(PROMPTS, want, strict=True):
            llm.manager.reset()
            poison(llm._transport._worker.caches)  # type: ignore[attr-defined]
            assert tokens(llm.generate([prompt], max_tokens=MAX_TOKENS)) == expected


def poison(caches: Any) -> None:
    for tensor in caches.get_kv_caches().values():
        fill = np.full(tensor.shape, 255, np.uint8) if tensor.dtype == paddle.uint8 else np.full(tensor.shape, np.nan)
        paddle.assign(paddle.to_tensor(fill).astype(tensor.dtype), tensor)


def test_mla_fp8_needs_the_latents_scale() -> None:
    data = kind_data("mla", cache={"kv_cache_quant_type": "fp8", "scales_file": None})
    with pytest.raises(ConfigError, match="needs static scales"):
        LLM(parse_config(data))
    with pytest.raises(ConfigError, match="scale_granularity channel is not possible.*mla.*tensor"):
        parse_config(kind_data("mla", cache={"kv_cache_quant_type": "fp8", "scale_granularity": "channel"}))
