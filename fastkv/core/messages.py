"""What crosses between the scheduler side and the worker side: plain values, MessagePack, never pickle.

The engine's loop sends a StepPlan with a plan_id; the worker answers with a StepResult that carries the same id, or
with a Failure. Copies between levels (core/transfers.py) start with a step, or with a Poll when no step runs; what
became of them comes back with whatever is answered next. Array fields are little-endian bytes of a fixed integer type,
so both sides read them without a loop: `pack(array)` and `unpack(data, dtype)`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from fastkv.core.transfers import TransferAck, TransferPlan
from fastkv.errors import InvariantError

INT32, INT64 = np.dtype("<i4"), np.dtype("<i8")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the struct's name travels as its tag."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How to pick a token from logits: temperature 0.0 is greedy; the seed makes sampling reproducible."""

    temperature: float = 0.0
    seed: int = 0


class StepPlan(Message, frozen=True):
    """One forward step over a ragged batch.

    Attributes:
        plan_id: given by the scheduler, repeated in the answer.
        token_ids: int32 [num_tokens], the requests' new tokens one after another.
        query_start: int32 [batch + 1], where each request's tokens start; the last entry is num_tokens.
        context_lens: int32 [batch], tokens already in the cache before this step.
        slot_mapping: int64 [num_tokens], where each token's K and V go; -1 writes nothing.
        block_tables: int32 [batch, max_blocks], padded with -1, row-major.
        max_blocks: columns of block_tables.
        sampling: for each request, how to sample after its last token; None when its prompt is not complete yet.
        sampled_positions: int32 [batch], index of the token that would be sampled (keys the random stream).
        transfers: copies that start with the step.
        loads: ids of plans that the step reads: a layer's attention waits until they landed in that layer.
    """

    plan_id: int
    token_ids: bytes
    query_start: bytes
    context_lens: bytes
    slot_mapping: bytes
    block_tables: bytes
    max_blocks: int
    sampling: tuple[SamplingParams | None, ...]
    sampled_positions: bytes
    transfers: tuple[TransferPlan, ...] = ()
    loads: tuple[int, ...] = ()


class StepResult(Message, frozen=True):
    """What a step gave.

    Attributes:
        plan_id: the step's.
        tokens: int32 [batch] as bytes, -1 where the plan asked for none; empty when the step is to be discarded.
        seconds: time that the worker took.
        acks: transfers that ended, of this step or an earlier one.
        is_discarded: a load failed, so nothing of the step may be used; plan it again.
    """

    plan_id: int
    tokens: bytes
    seconds: float
    acks: tuple[TransferAck, ...] = ()
    is_discarded: bool = False


class Poll(Message, frozen=True):
    """Start copies and ask what became of earlier ones, when there is no step to run.

    Attributes:
        plan_id: repeated in the answer.
        transfers: copies to start.
        wait_s: how long the worker may wait until something ended.
    """

    plan_id: int
    transfers: tuple[TransferPlan, ...] = ()
    wait_s: float = 0.0


class PollResult(Message, frozen=True):
    """Answer to a Poll.

    Attributes:
        plan_id: the Poll's.
        acks: transfers that ended.
        storage_counters: events of this rank's storage so far, by name; empty without storage.
        storage_error: text of its last fault, or "".
    """

    plan_id: int
    acks: tuple[TransferAck, ...] = ()
    storage_counters: dict[str, int] = {}
    storage_error: str = ""


class ResetCache(Message, frozen=True):
    """Ask the worker to zero its device and host caches; the scheduler has forgotten what they held."""

    plan_id: int


class SetWeightsVersion(Message, frozen=True):
    """The weights changed: storage is read and written under the new version from now on."""

    plan_id: int
    version: str


class Sleep(Message, frozen=True):
    """Give the device cache's memory back to the system, and with release_host the host cache's too."""

    plan_id: int
    release_host: bool = False


class Wake(Message, frozen=True):
    """Take the memory again; the caches are empty, static scales are as before."""

    plan_id: int


class Shutdown(Message, frozen=True):
    """Ask the worker to free its caches and leave."""


class WorkerReady(Message, frozen=True):
    """First message of a worker: what it allocated, from the tensors themselves.

    Attributes:
        num_device_blocks, num_host_blocks: blocks of the pools.
        storage_dtype: dtype of the key (or latent) tensors.
        device_cache_bytes, mtp_cache_bytes, host_cache_bytes: nbytes of what was allocated: main on the device, MTP on
            the device, host payload.
        vocab_size: token ids are below it.
        weights_fingerprint: names the model's weights.
        storage_namespace: what the stored records belong to (StorageNamespace.to_json); empty without storage.
    """

    num_device_blocks: int
    num_host_blocks: int
    storage_dtype: str
    device_cache_bytes: int
    mtp_cache_bytes: int
    host_cache_bytes: int
    vocab_size: int
    weights_fingerprint: str
    storage_namespace: bytes = b""


class Done(Message, frozen=True):
    """Acknowledges a message that has no other answer."""

    plan_id: int


class Failure(Message, frozen=True):
    """The worker could not do what was asked. kind is the error's class name in fastkv.errors, or the Python class."""

    plan_id: int
    kind: str
    message: str


AnyMessage = (
    StepPlan
    | StepResult
    | Poll
    | PollResult
    | ResetCache
    | SetWeightsVersion
    | Sleep
    | Wake
    | Shutdown
    | WorkerReady
    | Done
    | Failure
)

_decoder = msgspec.msgpack.Decoder(AnyMessage)
_encoder = msgspec.msgpack.Encoder()


def encode(message: AnyMessage) -> bytes:
    """A message as MessagePack."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message in data.

    Raises:
        InvariantError: not a message of this version.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise InvariantError(f"undecodable message of {len(data)} bytes: {error}") from error


def pack(array: npt.ArrayLike, dtype: np.dtype[np.signedinteger] = INT32) -> bytes:
    """Bytes of an integer array, row-major."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: np.dtype[np.signedinteger] = INT32) -> npt.NDArray[np.signedinteger]:
    """Read-only 1-d view of bytes made by `pack`."""
    return np.frombuffer(data, dtype=dtype)
