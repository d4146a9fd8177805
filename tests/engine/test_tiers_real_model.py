"""SmolLM2 over a device cache that is too small for its prompts, with host and disk below it: exactly the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastkv import Config, load_config
from fastkv.engine.llm import LLM

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2.yaml"
SHARED = (
    "A cache keeps a copy of what was computed or fetched before, close to where it will be needed next. When room is "
    "short, something has to leave, and the question is always the same: what will be missed the least? "
)
QUESTIONS = [
    "In one short sentence, explain why the least recently used entry is often the right one to give up.",
    "Name one everyday example of a cache that a child would know, and say what it keeps and what it drops.",
    "What happens to a program when the data that it works on no longer fits its cache? Answer in a few words.",
]
PROMPTS = [SHARED + question for question in QUESTIONS]
# (prompts, tokens each): every prompt twice, so that selective writing finds its blocks; then all of them again
ROUNDS = [*(([prompt] * 2, 1) for prompt in PROMPTS), (PROMPTS, 8)]


def config(**changes: Any) -> Config:
    overrides = {
        "cache.block_size": 8,
        "cache.device_memory": None,
        "cache.host_memory": None,
        "cache.num_device_blocks": 12,
        "cache.num_host_blocks": 40,
        "scheduler.max_batch_size": 1,
        **{f"cache.{key}": value for key, value in changes.items()},
    }
    return load_config(CONFIG, overrides)


def texts(llm: LLM) -> tuple[list[str], dict[str, int]]:
    """What the rounds answer, and the blocks that moved."""
    generations = [llm.generate(prompts, max_tokens=num_tokens) for prompts, num_tokens in ROUNDS]
    llm.manager.check_integrity()
    moved: dict[str, int] = {}
    for generation in generations:
        for name, count in generation.report.to_dict()["moved"].items():
            moved[name] = moved.get(name, 0) + count
    return [output.text for generation in generations for output in generation.outputs], moved


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM(config(num_device_blocks=400, num_host_blocks=0)) as llm:
        return texts(llm)[0]


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_smollm2_with_a_small_device_cache_gives_the_text_of_an_unbounded_one(
    expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("FASTKV_STORAGE__PATH", str(tmp_path))
    monkeypatch.setenv("FASTKV_STORAGE__MAX_BYTES", "256MiB")
    with LLM(config(write_policy=policy, write_through_threshold=1)) as llm:
        assert llm.manager.stats().num_blocks == 12
        found, moved = texts(llm)
    assert found == expected
    assert all(text.strip() for text in found[-len(PROMPTS) :])  # they do answer
    assert moved["offloaded_blocks"] > 0
    assert moved["loaded_blocks"] > 0
    assert moved["stored_blocks"] > 0
    assert moved["failed_transfers"] == 0
