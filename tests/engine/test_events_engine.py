"""What the config switches on around the engine's manager: eviction policy, KV events, and forgetting everything."""

from __future__ import annotations

import signal
import struct
import threading
import time
from typing import Any

import pytest
from helpers.engine import PROMPTS, tiny_config
from helpers.scheduler_events import EventFollower

from fastkv import Config, ConfigError, RequestError
from fastkv.core.digest import prefix_digests
from fastkv.engine.llm import LLM
from fastkv.scheduler.events import EventBatch, decode_batch
from fastkv.scheduler.policy import EvictionPolicy

LONG = [prompt for prompt in PROMPTS if len(prompt) >= 8]


def small(events: dict[str, Any] | None = None, **cache: Any) -> Config:
    sections = {} if events is None else {"kv_events": events}
    return tiny_config(cache={"block_size": 4, "num_device_blocks": 40, "num_host_blocks": 60, **cache}, **sections)


def token_ids(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, max_tokens=6).outputs]


@pytest.mark.parametrize("policy", [policy.value for policy in EvictionPolicy])
def test_eviction_policy_of_the_config_reaches_the_manager(policy: str) -> None:
    """What `fastkv replay --policy` recommends can be switched on, and changes no text."""
    with LLM(small(num_device_blocks=400)) as llm:
        wanted = token_ids(llm)
    with LLM(small(eviction_policy=policy)) as llm:
        assert llm.manager.policy is EvictionPolicy(policy)
        assert token_ids(llm) == wanted
        assert token_ids(llm) == wanted
        assert llm.manager.stats().evicted_blocks > 0


def test_eviction_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="eviction_policy"):
        small(eviction_policy="fifo")


def test_events_of_generate_tell_a_subscriber_what_the_manager_finds() -> None:
    follower, batches = EventFollower(), []

    def take(batch: EventBatch) -> None:
        batches.append(batch)
        follower.apply(batch.events)

    with LLM(small({})) as llm:
        stop = llm.subscribe_kv_events(take)
        token_ids(llm)
        token_ids(llm)
        late = EventFollower()
        late.apply(llm.manager.take_events(everything=True))
        assert follower.media == late.media
        assert {medium for media in follower.media.values() for medium in media} == {"GPU", "CPU"}
        assert len(batches) > 4  # once a step, not once at the end
        llm.reset_prefix_cache()
        assert follower.media == {}
        token_ids(llm, LONG)
        assert set(prefix_digests(LONG[-1], 4)) <= set(follower.media)
        llm.sleep(release_host=True)
        assert follower.media == {}
        llm.wake()
        token_ids(llm, LONG)
        llm.set_weights_version("2")
        assert follower.media == {}
        stop()
        token_ids(llm, LONG)
        assert follower.media == {}


def test_subscriber_that_waits_for_ever_can_be_interrupted_and_others_miss_nothing() -> None:
    """Signals were held while subscribers ran: a queue that nobody emptied could be ended by SIGKILL alone."""
    follower, went_on = EventFollower(), []

    def wait(batch: EventBatch) -> None:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        went_on.append(threading.Event().wait(5))

    def take(batch: EventBatch) -> None:
        follower.apply(batch.events)

    with LLM(small({})) as llm:
        stop = llm.subscribe_kv_events(wait)
        llm.subscribe_kv_events(take)
        with pytest.raises(KeyboardInterrupt):
            token_ids(llm)
        assert not went_on
        stop()
        llm.manager.check_integrity()
        assert llm.manager.stats().open_requests == 0
        token_ids(llm)
        late = EventFollower()
        late.apply(llm.manager.take_events(everything=True))
        assert follower.media == late.media


def test_events_of_generate_reach_a_zmq_subscriber() -> None:
    zmq = pytest.importorskip("zmq")
    config = small({"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv"})
    context = zmq.Context()
    try:
        with LLM(config) as llm:
            assert llm._events is not None
            (publisher,) = llm._events._publishers
            replay = context.socket(zmq.DEALER)
            replay.rcvtimeo = 10_000
            replay.connect(publisher.replay_endpoint)  # type: ignore[attr-defined]
            sub = context.socket(zmq.SUB)
            sub.rcvtimeo = 10_000
            sub.connect(publisher.endpoint)  # type: ignore[attr-defined]
            sub.subscribe(b"kv")
            time.sleep(0.3)  # a subscriber joins after a moment; what it missed can be replayed
            token_ids(llm, LONG)
            wanted = EventFollower()
            wanted.apply(llm.manager.take_events(everything=True))
            topic, number, _ = sub.recv_multipart()
            assert topic == b"kv"
            assert struct.unpack(">q", number) >= (0,)
            follower, end_s = EventFollower(), time.monotonic() + 10
            while follower.media != wanted.media and time.monotonic() < end_s:  # the publisher has its own thread
                follower = EventFollower()
                replay.send_multipart((b"", struct.pack(">q", 0)))
                while (message := replay.recv_multipart())[1] != struct.pack(">q", -1):
                    follower.apply(decode_batch(message[2]).events)
            assert follower.media == wanted.media
    finally:
        context.destroy(linger=0)


def test_events_that_nobody_asked_for_are_not_recorded_and_say_how_to_get_them() -> None:
    with LLM(small()) as llm:
        with pytest.raises(ConfigError, match="add a kv_events section"):
            llm.subscribe_kv_events(lambda batch: None)
        token_ids(llm, LONG)
        assert llm.manager.take_events() == []


@pytest.mark.parametrize(
    ("events", "cache", "message"),
    [
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"replay_endpoint": "tcp://127.0.0.1:0"}, {}, "set kv_events.endpoint too"),
        ({"shape": "list"}, {}, "kv_events.shape"),
        ({"port": 5}, {}, "'port'"),
    ],
)
def test_events_config_that_cannot_work_is_refused(events: dict[str, Any], cache: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(events, **cache)


def test_events_endpoint_that_cannot_be_bound_stops_the_engine_and_leaves_nothing(tmp_path: Any) -> None:
    pytest.importorskip("zmq")
    storage = {"path": str(tmp_path), "max_bytes": "8MiB", "segment_bytes": "1MiB"}
    cache = {"num_host_blocks": 8}
    with pytest.raises(ConfigError, match="cannot bind nonsense"):
        LLM(tiny_config(cache=cache, storage=storage, kv_events={"endpoint": "nonsense"}))
    LLM(tiny_config(cache=cache, storage=storage)).close()  # the store was given back


@pytest.mark.parametrize("manager", ["v0", "v1"])
def test_reset_prefix_cache_forgets_and_zeroes_but_not_while_requests_run(manager: str) -> None:
    config = tiny_config(cache={"block_size": 4, "manager": manager})
    with LLM(config) as llm:
        wanted = token_ids(llm, LONG)
        caches = llm._transport._worker.caches  # type: ignore[union-attr]
        assert caches.layer_cache(0).key.any()

        def too_early(done: int, num_tokens: int) -> None:
            if done < len(LONG):
                with pytest.raises(RequestError, match="requests are running"):
                    llm.reset_prefix_cache()

        again = llm.generate(LONG, max_tokens=6, on_progress=too_early)
        assert again.report.prefix_hit_tokens > 0
        llm.reset_prefix_cache()
        assert not caches.layer_cache(0).key.any()
        generation = llm.generate(LONG[-1:], max_tokens=6)
        assert generation.report.prefix_hit_tokens == 0
        assert generation.outputs[0].token_ids == wanted[-1]
