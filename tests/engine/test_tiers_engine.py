"""The engine with host and storage below a device cache that is too small: the same text as with an unbounded cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.attention_kinds import kind_data
from helpers.copies import FaultyCopier
from helpers.tier_engine import POLICIES, PROMPTS, ROUNDS, SHARED, moved, run_rounds, small, unbounded_text

from fastkv import CacheController, ConfigError, RequestError, StorageError, parse_config
from fastkv.core.messages import AnyMessage
from fastkv.engine import levels
from fastkv.engine.llm import LLM
from fastkv.engine.transport import ProcessWorker
from fastkv.worker import controller as controller_module
from fastkv.worker import storage_access
from fastkv.worker.records import Direction
from fastkv.worker.ticket import Ticket


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    return unbounded_text()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quant_type", ["none", "block_wise_fp8", "int8"])
def test_small_device_with_host_and_disk_gives_the_text_of_an_unbounded_cache(
    expected: dict[str, list[list[int]]], tmp_path: Path, policy: str, quant_type: str
) -> None:
    config = small(policy, tmp_path, kv_cache_quant_type=quant_type)
    with LLM(config) as llm:
        tokens, generations = run_rounds(llm)
        assert llm.manager.stats().held == 0
        assert llm.manager.stats().evicted_blocks > 0
    assert tokens == expected[quant_type]
    for name in ("offloaded_blocks", "loaded_blocks", "stored_blocks"):
        assert moved(generations, name) > 0, name
    assert moved(generations, "failed_transfers") == 0
    assert generations[-1].report.prefix_hit_tokens > sum(len(SHARED) // 4 * 4 for _ in PROMPTS[1:])
    assert generations[0].report.to_dict()["write_policy"] == policy


@pytest.mark.parametrize("policy", POLICIES)
def test_host_smaller_than_the_working_set_gives_the_same_text_with_storage_below(
    expected: dict[str, list[list[int]]], tmp_path: Path, policy: str
) -> None:
    with LLM(small(policy, tmp_path, num_host_blocks=9)) as llm:
        tokens, generations = run_rounds(llm)
    assert tokens == expected["none"]
    if policy != "write_through_selective":  # which stores little of what is found once
        assert moved(generations, "fetched_blocks") > 0
    counters = generations[-1].report.storage_counters
    assert counters["put_stored"] > 0
    assert counters["put_stored"] + counters.get("put_exists", 0) == moved(generations, "stored_blocks")
    assert counters.get("get_hit", 0) == moved(generations, "fetched_blocks")


def test_worker_process_moves_blocks_as_the_inline_worker_does(
    expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with LLM(small("write_back", tmp_path), "process") as llm:
        tokens, generations = run_rounds(llm)
    assert tokens == expected["none"]
    assert moved(generations, "loaded_blocks") > 0


def test_mla_latents_and_mtp_layers_move_too(tmp_path: Path) -> None:
    data = kind_data("mla", cache={"block_size": 4, "num_device_blocks": 600}, speculation={"num_layers": 1})
    with LLM(parse_config(data)) as llm:
        wanted, _ = run_rounds(llm)
    data["cache"] |= {"num_device_blocks": 26, "num_host_blocks": 60}
    with LLM(parse_config(data)) as llm:
        tokens, generations = run_rounds(llm)
    assert tokens == wanted
    assert moved(generations, "loaded_blocks") > 0


def test_warm_start_finds_the_prefixes_of_the_engine_before(
    expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with LLM(small(store=tmp_path)) as llm:
        first, _ = run_rounds(llm, [PROMPTS])
    with LLM(small("write_back", tmp_path)) as llm:
        second, generations = run_rounds(llm, [PROMPTS])
    report = generations[0].report
    assert second == first == expected["none"][-5:]
    assert report.moved.fetched_blocks > 0
    # every whole block but the one that must be computed is found
    assert report.prefix_hit_tokens == sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    with LLM(small(store=tmp_path, kv_cache_quant_type="block_wise_fp8")) as llm:
        other, generations = run_rounds(llm, [PROMPTS])
    assert generations[0].report.moved.fetched_blocks == 0  # foreign bytes are not found at all
    assert other == expected["block_wise_fp8"][-5:]


def test_stale_after_update_every_level_misses(expected: dict[str, list[list[int]]], tmp_path: Path) -> None:
    """Kind "stale after update", through the engine."""
    prompt = [PROMPTS[0]]
    with LLM(small(store=tmp_path)) as llm:
        run_rounds(llm, [prompt])
        assert run_rounds(llm, [prompt])[1][0].report.prefix_hit_tokens > 0
        llm.set_weights_version("2")
        tokens, generations = run_rounds(llm, [prompt, prompt])
        assert [one.report.prefix_hit_tokens > 0 for one in generations] == [False, True]
        assert tokens[0] == expected["none"][-5]
        threads = threading.active_count()
        for bad in ("", 7):
            with pytest.raises(RequestError, match="non-empty"):
                llm.set_weights_version(bad)  # type: ignore[arg-type]
        assert threading.active_count() == threads
        assert run_rounds(llm, [prompt])[1][0].report.prefix_hit_tokens > 0  # nothing was changed
    with LLM(small(store=tmp_path)) as llm:  # the weights of the file again: what they computed is still there
        assert run_rounds(llm, [prompt])[1][0].report.moved.fetched_blocks > 0


@pytest.mark.parametrize("broken", ["open_lookup", "open_connector"])
def test_stale_after_update_even_if_storage_cannot_be_opened_again(
    expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    def refuse(*args: Any) -> None:
        raise StorageError("no disk today")

    prompt = [PROMPTS[0]]
    with LLM(small(store=tmp_path)) as llm:
        run_rounds(llm, [prompt])
        with monkeypatch.context() as patch:
            patch.setattr(levels if broken == "open_lookup" else storage_access, broken, refuse)
            with pytest.raises(StorageError, match="no disk today"):
                llm.set_weights_version("2")
        tokens, generations = run_rounds(llm, [prompt])
        assert tokens[0] == expected["none"][-5]
        assert generations[0].report.prefix_hit_tokens == 0
        assert generations[0].report.moved.fetched_blocks == 0
        llm.set_weights_version("2")  # the disk is back
        assert moved(run_rounds(llm, [prompt])[1], "failed_transfers") == 0
    with LLM(small(store=tmp_path)) as llm:
        llm.set_weights_version("2")
        assert run_rounds(llm, [prompt])[1][0].report.moved.fetched_blocks > 0


def test_new_weights_whose_answer_is_interrupted_keep_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C while the worker opened storage for them: nothing was looked up there until the engine ended."""
    real, prompt = ProcessWorker.send, [PROMPTS[0]]

    def interrupted(self: ProcessWorker, message: AnyMessage) -> None:
        real(self, message)
        signal.raise_signal(signal.SIGINT)

    with LLM(small(store=tmp_path), "process") as llm:
        with monkeypatch.context() as patch:
            patch.setattr(ProcessWorker, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.set_weights_version("2")
        want = run_rounds(llm, [prompt])[0]
        llm.sleep(release_host=True)
        llm.wake()
        tokens, generations = run_rounds(llm, [prompt])
        assert tokens == want
        assert generations[0].report.moved.fetched_blocks > 0


@pytest.mark.parametrize("release_host", [False, True])
def test_sleep_and_wake_keep_the_text(expected: dict[str, list[list[int]]], tmp_path: Path, release_host: bool) -> None:
    """Kind "scales" through the engine: int8 needs its static scales after waking."""
    with LLM(small(kv_cache_quant_type="int8")) as llm:
        first, _ = run_rounds(llm, ROUNDS[:2])
        llm.sleep(release_host=release_host)
        with pytest.raises(Exception, match="asleep"):
            llm.generate(PROMPTS[:1], max_tokens=1)
        llm.wake()
        second, generations = run_rounds(llm, ROUNDS[2:])
    assert first + second == expected["int8"]
    in_batch = len(SHARED)  # the second prompt finds these anyway
    assert (generations[0].report.prefix_hit_tokens > in_batch) is not release_host


class LayerByLayer(FaultyCopier):
    """Brings a layer when attention has come to it, and a little later: nobody may read it before, or wait longer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reached = [threading.Event() for _ in range(self.num_layers)]
        self.in_vain: list[int] = []  # layers that attention did not come to before the load was over

    def _copy(self, direction: Direction, device_ids: Any, host_ids: Any, layers: range) -> None:
        if direction is Direction.TO_DEVICE:
            if not self.reached[layers.start].wait(3):
                self.in_vain.append(layers.start)
            time.sleep(0.05)
        super()._copy(direction, device_ids, host_ids, layers)


def test_attention_of_a_layer_waits_for_that_layer_and_for_no_later_one(
    expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind "copy order": a layer is read only when its bytes landed; the next one moves meanwhile."""
    made: list[LayerByLayer] = []
    real_copier, real_wait = controller_module.RecordCopier, controller_module.CacheController.wait_for_layer

    def make(*args: Any) -> LayerByLayer:
        made.append(LayerByLayer(real_copier(*args)))
        return made[-1]

    def wait(controller: controller_module.CacheController, ticket: Ticket, layer: int) -> None:
        made[0].reached[layer].set()
        real_wait(controller, ticket, layer)

    monkeypatch.setattr(controller_module, "RecordCopier", make)
    monkeypatch.setattr(controller_module.CacheController, "wait_for_layer", wait)
    with LLM(small(num_device_blocks=80)) as llm:
        first, _ = run_rounds(llm, ROUNDS[:1])
        llm.sleep()
        llm.wake()  # the device holds zeros
        second, generations = run_rounds(llm, [PROMPTS[:1]])
    assert first + second == expected["none"][:3] + expected["none"][:1]
    assert moved(generations, "loaded_blocks") > 0
    assert made[0].num_layers > 1
    assert made[0].in_vain == []


def test_two_engines_on_one_store_the_second_is_refused_clearly(tmp_path: Path) -> None:
    with LLM(small(store=tmp_path)), pytest.raises(StorageError, match=r"by process \d+, which is this one or"):
        LLM(small(store=tmp_path))
    with LLM(small(store=tmp_path)) as llm:  # nothing was left behind
        run_rounds(llm, [PROMPTS[:1]])


def test_engine_that_could_not_attach_its_storage_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: Any) -> None:
        raise ConfigError("not attached")

    with monkeypatch.context() as patch:
        patch.setattr(CacheController, "attach_storage", refuse)
        with pytest.raises(ConfigError, match="not attached"):
            LLM(small(store=tmp_path))
    LLM(small(store=tmp_path)).close()


def test_levels_import_without_paddle() -> None:
    """The engine's process sets the environment before Paddle is loaded; importing its levels must not load it."""
    code = "import sys; sys.modules['paddle'] = None; import fastkv.engine.levels, fastkv.engine.llm"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- closing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["inline", "process"])
def test_close_twice_and_with_storage_is_quiet(tmp_path: Path, worker: str) -> None:
    llm = LLM(small(store=tmp_path), worker)
    run_rounds(llm, [PROMPTS[:1]])
    llm.close()
    llm.close()


def test_close_with_a_stuck_storage_backend_says_that_something_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = LLM(small(store=tmp_path))
    real = storage_access.StorageAccess.close
    monkeypatch.setattr(storage_access.StorageAccess, "close", lambda access: real(access) and False)
    with pytest.raises(StorageError, match="stuck in a call"):
        llm.close()
