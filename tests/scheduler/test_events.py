"""KV events: what a router that follows them knows, and how they travel."""

from __future__ import annotations

import struct
import time

import msgspec
import pytest
from helpers.scheduler_events import EventFollower
from helpers.tier_world import TierWorld

from fastkv.core.digest import Identity, ImageSpan, prefix_digests
from fastkv.errors import ConfigError
from fastkv.scheduler import CacheManager
from fastkv.scheduler.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventStream,
    ZmqPublisher,
    decode_batch,
    encode_batch,
)

EIGHT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
def recorded() -> CacheManager:
    return CacheManager(4, 4, record_events=True)


def test_events_of_a_prompt_are_one_stored_run_with_digests_and_parent(recorded, admit):
    admit(recorded, "one", EIGHT)
    assert recorded.take_events() == [BlockStored(prefix_digests(EIGHT, 4), None, EIGHT, 4, None, "GPU", None)]
    assert recorded.take_events() == []
    recorded.append("one", [1, 2, 3, 4])
    recorded.allocate("one", 1)
    recorded.publish("one", 12)
    digests = prefix_digests([*EIGHT, 1, 2, 3, 4], 4)
    assert recorded.take_events() == [BlockStored(digests[2:], digests[1], [1, 2, 3, 4], 4, None, "GPU", None)]


def test_events_name_the_adapter_and_the_identity_bytes(recorded, admit):
    identity = Identity(lora="ad", lora_id=3, images=(ImageSpan(b"pic", 5, 6),))
    admit(recorded, "one", EIGHT, identity)
    (event,) = recorded.take_events()
    assert (event.lora_id, event.lora_name) == (3, "ad")
    extras = identity.block_extras(4)
    assert event.extra_keys == [(extras[0],), (extras[1],)]
    assert event.block_hashes == prefix_digests(EIGHT, 4, identity)


def test_events_duplicate_block_is_stored_once_and_removed_with_its_last_copy(recorded):
    for name in ("one", "two"):
        recorded.open(name, EIGHT)
        recorded.allocate(name, 2)
    recorded.publish("one", 8)
    recorded.publish("two", 8)
    recorded.release("one")
    follower = EventFollower()
    follower.apply(recorded.take_events())
    assert set(follower.media) == set(prefix_digests(EIGHT, 4))
    recorded.release("two")
    recorded.open("three", [99] * 16)
    recorded.allocate("three", 4)
    assert recorded.take_events() == [BlockRemoved(prefix_digests(EIGHT, 4)[::-1], "GPU")]


def test_events_of_blocks_that_left_before_anybody_read_keep_their_digests(recorded, admit):
    admit(recorded, "one", EIGHT)
    recorded.release("one")
    recorded.open("two", [99] * 16)
    recorded.allocate("two", 4)
    stored, removed = recorded.take_events()
    assert stored.block_hashes == removed.block_hashes[::-1] == prefix_digests(EIGHT, 4)


def test_events_after_new_weights_start_from_nothing(recorded, admit):
    admit(recorded, "one", EIGHT)
    recorded.set_weights_version("2")
    assert recorded.take_events() == [AllBlocksCleared()]
    recorded.release("one")
    assert recorded.take_events() == []
    admit(recorded, "two", EIGHT)
    (event,) = recorded.take_events()
    assert event.block_hashes == prefix_digests(EIGHT, 4, Identity(weights_version="2"))


def test_events_that_nobody_reads_are_replaced_by_what_is_findable():
    """The log is bounded: 2**17 records."""
    manager = CacheManager(100_000, 1, record_events=True)
    for name in range(3):
        manager.open(str(name), [name] * 100_000)
        manager.allocate(str(name), 100_000)
        manager.publish(str(name), 100_000)
        manager.release(str(name))
    events = manager.take_events()
    assert events[0] == AllBlocksCleared()
    assert sum(len(event.block_hashes) for event in events[1:]) == 100_000
    assert all(isinstance(event, BlockStored) for event in events[1:])
    assert events[1].token_ids[0] == 2


def test_events_off_by_default_give_nothing(manager, admit):
    admit(manager, "one", EIGHT)
    assert manager.take_events() == []
    assert manager.take_events(everything=True) == []


def test_event_stream_closes_every_publisher_when_a_subscriber_raises(recorded, admit):
    """The last flush raised, and sockets and threads of the publishers were left."""

    class Closing:
        def __init__(self, error=None):
            self.error, self.calls = error, []

        def publish(self, batch):
            self.calls.append("publish")

        def close(self):
            self.calls.append("close")
            if self.error is not None:
                raise self.error

    first, second = Closing(OSError("no socket")), Closing()
    stream = EventStream(recorded.take_events, [first, second])
    stream.subscribe(lambda batch: 1 / 0)
    admit(recorded, "one", EIGHT)
    with pytest.raises(OSError, match="no socket") as raised:
        stream.close()
    assert isinstance(raised.value.__context__, ZeroDivisionError)
    assert first.calls == second.calls == ["publish", "close"]


def test_event_stream_hands_batches_to_subscribers(recorded, admit):
    stream, seen = EventStream(recorded.take_events, data_parallel_rank=2), []
    stop = stream.subscribe(seen.append)
    assert stream.flush() == 0
    admit(recorded, "one", EIGHT)
    assert stream.flush() == 1
    stop()
    recorded.set_weights_version("2")
    assert stream.flush() == 1
    assert [len(batch.events) for batch in seen] == [1]
    assert seen[0].data_parallel_rank == 2
    assert abs(seen[0].ts - time.time()) < 60
    stream.close()


def test_event_stream_gives_everybody_the_batch_when_a_subscriber_raises(recorded, admit):
    first, last = [], []

    def broken(name: str) -> None:
        raise ValueError(name)

    stream = EventStream(recorded.take_events)
    for subscriber in (first.append, lambda _: broken("one"), lambda _: broken("two"), last.append):
        stream.subscribe(subscriber)
    admit(recorded, "one", EIGHT)
    with pytest.raises(ValueError, match="two") as caught:
        stream.flush()
    assert str(caught.value.__context__) == "one"
    assert len(first) == 1
    assert first == last
    assert stream.flush() == 0


def test_event_stream_whose_subscriber_is_interrupted_serves_the_others_and_raises_the_interrupt(recorded, admit):
    def interrupted(batch: EventBatch) -> None:
        raise KeyboardInterrupt

    stream, last = EventStream(recorded.take_events), []
    for subscriber in (interrupted, lambda _: 1 / 0, last.append):
        stream.subscribe(subscriber)
    admit(recorded, "one", EIGHT)
    with pytest.raises(KeyboardInterrupt) as caught:
        stream.flush()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert len(last) == 1


BATCH = EventBatch(
    1.5,
    [BlockStored([b"a" * 32], None, [1, 2], 2, 7, "GPU", "ad"), BlockRemoved([b"b" * 32], "CPU"), AllBlocksCleared()],
    0,
)


def test_encode_batch_array_shape_is_vllms_classic_one():
    raw = msgspec.msgpack.decode(encode_batch(BATCH, shape="array"))
    assert raw == [
        1.5,
        [
            ["BlockStored", [b"a" * 32], None, [1, 2], 2, 7, "GPU", "ad", None],
            ["BlockRemoved", [b"b" * 32], "CPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


@pytest.mark.parametrize("shape", ["map", "array"])
def test_decode_batch_reads_both_shapes_and_nothing_else(shape):
    assert decode_batch(encode_batch(BATCH, shape=shape)) == BATCH
    for events in (
        [{"type": "BlockLost"}],
        [{}],
        ["BlockRemoved"],
        [["BlockRemoved", 3, "GPU"]],
        [{"type": "BlockStored"}],
    ):
        with pytest.raises(msgspec.ValidationError):
            decode_batch(msgspec.msgpack.encode((1.5, events, 0)))


def test_encode_batch_map_shape_and_int_hashes():
    _, events, _ = msgspec.msgpack.decode(encode_batch(BATCH, int_hashes=True))
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(b"a" * 8, "big")],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": 7,
        "medium": "GPU",
        "lora_name": "ad",
    }
    assert events[1:] == [
        {"type": "BlockRemoved", "block_hashes": [int.from_bytes(b"b" * 8, "big")], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ]
    with pytest.raises(ConfigError, match="allowed: map, array"):
        encode_batch(BATCH, shape="xml")


def test_zmq_publisher_sends_batches_and_replays_missed_ones(recorded, admit):
    zmq = pytest.importorskip("zmq")
    publisher = ZmqPublisher("tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv")
    stream = EventStream(recorded.take_events, [publisher])
    context = zmq.Context()
    sub, ask = context.socket(zmq.SUB), context.socket(zmq.REQ)
    for socket in (sub, ask):
        socket.rcvtimeo = 10_000
    sub.connect(publisher.endpoint)
    sub.subscribe(b"kv")
    try:
        admit(recorded, "one", EIGHT)
        stream.flush()
        time.sleep(0.3)  # a subscriber joins after a moment; what it missed can be replayed
        recorded.set_weights_version("2")
        stream.flush()
        follower, last = EventFollower(), -1
        while last < 1:
            topic, number, data = sub.recv_multipart()
            assert topic == b"kv"
            (last,) = struct.unpack(">q", number)
        assert decode_batch(data).events == [AllBlocksCleared()]
        ask = context.socket(zmq.DEALER)
        ask.rcvtimeo = 10_000
        ask.connect(publisher.replay_endpoint)
        ask.send_multipart((b"", struct.pack(">q", 0)))
        numbers = []
        while not numbers or numbers[-1] >= 0:
            _, number, data = ask.recv_multipart()
            numbers.append(struct.unpack(">q", number)[0])
            if numbers[-1] == 0:
                follower.apply(decode_batch(data).events)
        assert numbers == [0, 1, -1]
        assert set(follower.media) == set(prefix_digests(EIGHT, 4))
    finally:
        context.destroy(linger=0)
        stream.close()
    assert publisher.dropped_batches == 0


def test_zmq_publisher_that_cannot_bind_says_so():
    pytest.importorskip("zmq")
    with pytest.raises(ConfigError, match="cannot bind nonsense"):
        ZmqPublisher("nonsense")


def test_zmq_publisher_that_drops_batches_leaves_a_gap_in_their_numbers():
    zmq = pytest.importorskip("zmq")
    publisher = ZmqPublisher("tcp://127.0.0.1:0", topic="kv", max_queue=3)
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.rcvtimeo = 10_000
    sub.connect(publisher.endpoint)
    sub.subscribe(b"kv")
    time.sleep(0.3)
    numbers = list[int]()
    try:
        for _ in range(2000):
            publisher.publish(BATCH)
        time.sleep(0.3)  # the queue drains, so this one is not dropped
        publisher.publish(BATCH)
        while not numbers or numbers[-1] < 2000:
            numbers.append(struct.unpack(">q", sub.recv_multipart()[1])[0])
        assert publisher.dropped_batches
        assert numbers == sorted(set(numbers))
        assert numbers[-1] + 1 - len(numbers) == publisher.dropped_batches
    finally:
        context.destroy(linger=0)
        publisher.close()


# -- levels --


def test_events_demotion_keeps_a_hash_until_its_last_copy_goes():
    """Kind "events": device to host, out of the device, back, out of the host."""
    world = TierWorld(num_device=3, block_size=4, num_host=3)

    def media(tokens):
        world.check_events()
        return ["".join(sorted(m[0] for m in world.follower.media.get(d, ()))) for d in prefix_digests(tokens, 4)]

    one, two = [1] * 9, [2] * 9
    world.run("one", one)
    assert media(one) == ["CG", "CG"]
    world.run("two", two)  # takes all device blocks, and one host block: the leaf goes
    assert media(one) == ["C", ""]
    assert media(two) == ["CG", "CG"]
    world.run("one again", one)  # loads the first block, computes the second
    assert media(one) == ["CG", "CG"]
    world.tiers.forget_device()
    assert media(one) == ["C", "C"]
    world.tiers.forget_device(host_too=True)
    assert media(one) == media(two) == ["", ""]
    assert world.follower.media == {}
