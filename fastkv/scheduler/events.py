"""KV events: which blocks became findable at which level and which ceased to be, for cache-aware routers.

Owns the event types and how they travel. The manager records what happens (CacheManager(record_events=True)); an
`EventStream` takes the record once a step and hands it to subscribers in this process and, with the extra `events`, to
ZeroMQ sockets. The format is vLLM's, so that its routers understand it:

    EventBatch(ts, events, data_parallel_rank) as MessagePack; frames: topic | sequence number, 8 bytes BE | batch
    BlockStored(block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys)
    BlockRemoved(block_hashes, medium)
    AllBlocksCleared()

Events are maps with their name as "type", as vLLM and SGLang send them now, or arrays that start with it
(`shape="array"`), as vLLM did up to 0.2x; a batch is an array in both. A block hash is the block's prefix digest
(core.digest): 32 bytes as vLLM sends them, or with `int_hashes` its last 64 bits as an integer, which SGLang's readers
want. medium is "GPU" for the device level and "CPU" for the host level; a block is gone when it was removed from every
medium that it was stored in.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import msgspec

from fastkv.core.digest import decode_extra
from fastkv.errors import ConfigError

MEDIA = ("GPU", "CPU")
"""medium of the device and of the host level."""

BlockHash: TypeAlias = bytes | int


class BlockStored(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Blocks that can be found now, consecutive in one prefix.

    Attributes:
        block_hashes: one for each block.
        parent_block_hash: of the block before the first one; None at the start of a prompt.
        token_ids: of all blocks.
        block_size: tokens of a block.
        lora_id, lora_name: the adapter; None for the base model.
        medium: "GPU" or "CPU".
        extra_keys: for each block None, or a tuple with the identity bytes that go into its digest (core.digest).
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[bytes, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Blocks that cannot be found in this medium any more."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Nothing can be found any more, in any medium."""


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """What one step did. ts is seconds since the epoch."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None


Run: TypeAlias = tuple[int, int, list[bytes], bytes | None, list[int], list[bytes], bytes]


def events_of(runs: Sequence[Run], block_size: int) -> list[KVCacheEvent]:
    """Events of the native log's runs."""
    events: list[KVCacheEvent] = []
    for kind, level, digests, parent, tokens, extras, root_extra in runs:
        if kind == 2:
            events.append(AllBlocksCleared())
        elif kind == 1:
            events.append(BlockRemoved([*digests], MEDIA[level]))
        else:
            root = decode_extra(root_extra)
            keys: list[tuple[bytes, ...] | None] = [(extra,) if extra else None for extra in extras]
            has_lora = bool(root.lora or root.lora_id)
            events.append(
                BlockStored(
                    [*digests],
                    parent,
                    tokens,
                    block_size,
                    root.lora_id if has_lora else None,
                    MEDIA[level],
                    root.lora or None,
                    keys if any(extras) else None,
                )
            )
    return events


class Publisher(Protocol):
    """Where batches go. publish is called in order, by one thread at a time."""

    def publish(self, batch: EventBatch) -> None: ...

    def close(self) -> None: ...


class EventStream:
    """Takes a manager's events and hands them on; owned by the engine's loop.

    Args:
        take_events: CacheManager.take_events.
        publishers: in-process callables and publishers.
        data_parallel_rank: goes into each batch.
    """

    def __init__(
        self,
        take_events: Callable[[], list[KVCacheEvent]],
        publishers: Sequence[Publisher] = (),
        data_parallel_rank: int | None = None,
    ) -> None:
        self._take, self._publishers, self._rank = take_events, list(publishers), data_parallel_rank
        self._subscribers: list[Callable[[EventBatch], None]] = []

    def subscribe(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Call back with every batch from now on. Returns what ends the subscription."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def flush(self) -> int:
        """Hand on what happened since the last call. Returns the number of events.

        Everybody gets the batch, also when a subscriber raises; its error is raised afterwards (the last one, or rather
        an interrupt, with the others as its context).
        """
        events = self._take()
        errors: list[BaseException] = []
        if events:
            batch = EventBatch(time.time(), events, self._rank)
            for deliver in (*self._subscribers, *(publisher.publish for publisher in self._publishers)):
                try:
                    deliver(batch)
                except BaseException as error:  # a stranger's code; nobody else may miss the batch for it
                    errors.append(error)
        errors.sort(key=lambda error: not isinstance(error, Exception))
        for earlier, later in pairwise(errors):
            later.__context__ = earlier
        if errors:
            raise errors[-1]
        return len(events)

    def close(self) -> None:
        """Hand on the rest and close the publishers, each of them whatever the others and subscribers raise."""
        with contextlib.ExitStack() as ends:
            for publisher in reversed(self._publishers):
                ends.callback(publisher.close)
            self.flush()


def encode_batch(batch: EventBatch, *, shape: str = "map", int_hashes: bool = False) -> bytes:
    """A batch as MessagePack.

    Args:
        batch: with digests as hashes.
        shape: "map" or "array", see the module's header.
        int_hashes: hashes as integers of 64 bits.
    """
    if shape not in ("map", "array"):
        raise ConfigError(f"unknown event shape {shape!r}; allowed: map, array")
    events = [_with_int_hashes(event) for event in batch.events] if int_hashes else list(batch.events)
    body: list[Any] = [_as_map(event) for event in events] if shape == "map" else [*events]
    return _encoder.encode((batch.ts, body, batch.data_parallel_rank))


def decode_batch(data: bytes) -> EventBatch:
    """The batch in data, of either shape.

    Raises:
        msgspec.ValidationError: it is no batch of events.
    """
    ts, events, *rest = msgspec.convert(msgspec.msgpack.decode(data), tuple[float, list[Any], Any])
    return msgspec.convert((ts, [_as_array(event) for event in events], *rest), EventBatch)


_encoder = msgspec.msgpack.Encoder()
_KINDS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def _as_array(event: Any) -> Any:
    if not isinstance(event, dict):
        return event
    name = event.get("type")
    fields = _KINDS[name].__struct_fields__ if name in _KINDS else ()
    return [name, *(event.get(field) for field in fields)]


def _as_int(digest: BlockHash | None) -> int | None:
    return int.from_bytes(digest[-8:], "big") if isinstance(digest, bytes) else digest


def _with_int_hashes(event: KVCacheEvent) -> KVCacheEvent:
    if isinstance(event, AllBlocksCleared):
        return event
    hashes = [value for value in map(_as_int, event.block_hashes) if value is not None]
    if isinstance(event, BlockRemoved):
        return BlockRemoved([*hashes], event.medium)
    return msgspec.structs.replace(event, block_hashes=[*hashes], parent_block_hash=_as_int(event.parent_block_hash))


def _as_map(event: KVCacheEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    if fields.get("extra_keys", ...) is None:
        del fields["extra_keys"]
    return {"type": type(event).__name__, **fields}


class ZmqPublisher:
    """Sends batches over a ZeroMQ PUB socket from a thread of its own; needs the extra `events`.

    A subscriber that missed batches sends the first missing sequence number (8 bytes big-endian) to the replay endpoint
    and gets `sequence number | batch` for each that is still kept, then sequence number -1 with an empty batch.

    Args:
        endpoint: where to bind, for instance "tcp://127.0.0.1:5557"; a port of 0 takes a free one (see `endpoint`).
        replay_endpoint: ROUTER socket for replays; None for none.
        topic: first frame of every message.
        keep_batches: how many batches can be replayed.
        max_queue: batches that may wait to be sent; publish drops and counts what comes after. A dropped batch leaves a
            gap in the sequence numbers that no replay fills: its readers have to forget what they know.
        shape, int_hashes: as encode_batch.

    Raises:
        ConfigError: pyzmq is missing, or an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        keep_batches: int = 10_000,
        max_queue: int = 100_000,
        shape: str = "map",
        int_hashes: bool = False,
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError("KV events over ZeroMQ need pyzmq; install it: pip install 'fastkv[events]'") from error
        encode_batch(EventBatch(0.0, []), shape=shape)
        self._shape, self._int_hashes, self._topic = shape, int_hashes, topic.encode()
        self._queue: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(max_queue)
        self._next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep_batches)
        self._again, self._poll_in = zmq.Again, zmq.POLLIN
        self.dropped_batches = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        try:
            self._pub.bind(endpoint)
            if self._replay is not None and replay_endpoint is not None:
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot bind {endpoint} and {replay_endpoint}: {error}; choose free endpoints"
            ) from error
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else None
        self._thread = threading.Thread(target=self._run, name="fastkv-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue a batch; never blocks."""
        try:
            self._queue.put_nowait((self._next_sequence, batch))
        except queue.Full:
            self.dropped_batches += 1
        self._next_sequence += 1

    def close(self) -> None:
        """Send what is queued and close the sockets."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=200)

    def _run(self) -> None:
        while True:
            self._answer_replays()
            try:
                queued = self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
            if queued is None:
                return
            sequence, batch = queued
            data = encode_batch(batch, shape=self._shape, int_hashes=self._int_hashes)
            self._kept.append((sequence, data))
            self._pub.send_multipart((self._topic, struct.pack(">q", sequence), data))

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0, self._poll_in):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a replay request; there is nobody to tell
            (first,) = struct.unpack(">q", frames[2])
            for sequence, data in self._kept:
                if sequence >= first:
                    self._replay.send_multipart((frames[0], b"", struct.pack(">q", sequence), data))
            self._replay.send_multipart((frames[0], b"", struct.pack(">q", -1), b""))
