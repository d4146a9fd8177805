"""Replays a trace of requests through a CacheManager: what would a cache of this size have found?

Owns the trace format and the way a trace is fed to a manager. Called by `fastkv replay` and by whoever wants the
numbers without a command line. A trace names the content of each block by a hash id instead of giving tokens, so here
one hash id is one token and the manager's blocks are one token long. That is exact, not an approximation:

    trace request of L tokens, blocks of B     ceil(L / B) hash ids      the last one may stand for a partial block
    request given to the manager               ceil(L / B) tokens        blocks of 1 token
    "one token is left to compute"             at most ceil(L / B) - 1 = floor((L - 1) / B) blocks are found, in both
    full blocks only                           publish(floor(L / B)): a partial block is never published
    memory                                     ceil(L / B) blocks are held while the request runs, in both

Requests come in order of their timestamps, equal ones in the order of the file; each is matched, allocated, published
and released before the next one starts. Output tokens are ignored: a trace does not say what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import msgspec
import numpy as np

from fastkv.core.digest import TokenArray
from fastkv.errors import ConfigError
from fastkv.scheduler.manager import CacheManager
from fastkv.scheduler.policy import EvictionPolicy

UNBOUNDED: Final = 0
"""As a number of blocks: room for the whole trace, nothing is ever evicted."""

POLICIES: Final = tuple(policy.value for policy in EvictionPolicy)
"""Eviction policies that a replay can use, the manager's own default first."""

_REQUESTS_A_REPORT: Final = 256
_MAX_BLOCKS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        input_tokens: length of the prompt.
        contents: int32 [ceil(input_tokens / block_tokens)], one number for each different hash id of the trace.
    """

    input_tokens: int
    contents: TokenArray


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they arrived.

    Attributes:
        block_tokens: tokens that a hash id stands for.
        requests: by timestamp.
        num_blocks: blocks of all requests, partial ones included; what hit rates are a fraction of.
        num_unique: different hash ids.
    """

    block_tokens: int
    requests: tuple[TraceRequest, ...]
    num_blocks: int
    num_unique: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one cache size and policy would have done.

    Attributes:
        blocks: size of the cache; 0 is unbounded.
        policy: which block goes first.
        hit_blocks: blocks found in the cache.
        hit_rate: hit_blocks over all blocks of the trace, rejected requests included.
        evictions: published blocks that had to go.
        manager_seconds: time spent in the manager's calls, the calling loop included.
        saved_tokens: tokens that needed no prefill.
        rejected_requests: requests longer than the whole cache; they were not run and found nothing.
    """

    blocks: int
    policy: str
    hit_blocks: int
    hit_rate: float
    evictions: int
    manager_seconds: float
    saved_tokens: int
    rejected_requests: int


class _Line(msgspec.Struct):
    """One line of a trace file; other keys (output_length among them) are ignored."""

    timestamp: int | float
    input_length: int
    hash_ids: list[int | str]


def parse_trace(lines: Iterable[str | bytes], name: str = "trace", block_tokens: int | None = None) -> Trace:
    """Read a trace, one JSON object a line; empty lines are skipped.

    Args:
        lines: the file's lines.
        name: of the file, for messages.
        block_tokens: tokens of a block; None derives them from input_length and the number of hash_ids.

    Raises:
        ConfigError: a broken line (the message has its number), no request at all, or a block size that the lines
            contradict or leave open.
    """
    decoder = msgspec.json.Decoder(_Line)
    numbered: list[tuple[int, _Line]] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            numbered.append((number, _decode(decoder, text, f"{name} line {number}")))
    if not numbered:
        raise ConfigError(f"{name} has no requests; a trace has one JSON object a line")
    size = _derive_block_tokens(numbered, name) if block_tokens is None else block_tokens
    for number, line in numbered:
        expected = -(-line.input_length // size)
        if len(line.hash_ids) != expected:
            raise ConfigError(
                f"{name} line {number}: input_length {line.input_length} with blocks of {size} tokens needs "
                f"{expected} hash_ids, it has {len(line.hash_ids)}; a request has one for each block, the last may be "
                "partial"
            )
    number_of: dict[int | str, int] = {}
    requests = tuple(
        TraceRequest(
            line.input_length,
            np.array([number_of.setdefault(key, len(number_of)) for key in line.hash_ids], dtype=np.int32),
        )
        for _, line in sorted(numbered, key=lambda item: item[1].timestamp)
    )
    return Trace(size, requests, sum(len(r.contents) for r in requests), len(number_of))


def replay(
    trace: Trace, num_blocks: int, policy: str = POLICIES[0], on_requests: Callable[[int], None] | None = None
) -> ReplayResult:
    """Run the whole trace through a fresh manager.

    Args:
        trace: what to run.
        num_blocks: cache size in blocks of trace.block_tokens tokens; UNBOUNDED for one that holds everything.
        policy: one of POLICIES.
        on_requests: told now and then how many more requests are done; its time is not the manager's.

    Raises:
        ConfigError: a negative or impossible size, an unknown policy.
    """
    if not 0 <= num_blocks <= _MAX_BLOCKS:
        raise ConfigError(f"cache size {num_blocks} must be 0 (unbounded) or up to {_MAX_BLOCKS} blocks")
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r} is unknown; allowed: {', '.join(POLICIES)}")
    limit = num_blocks if num_blocks != UNBOUNDED else trace.num_blocks
    manager = CacheManager(limit, 1, policy=policy)
    runnable = [request for request in trace.requests if len(request.contents) <= limit]
    seconds = 0.0
    for start in range(0, len(runnable), _REQUESTS_A_REPORT):
        batch = runnable[start : start + _REQUESTS_A_REPORT]
        seconds += _run(manager, [(r.contents, r.input_tokens // trace.block_tokens) for r in batch])
        if on_requests:
            on_requests(len(batch))
    rejected = len(trace.requests) - len(runnable)
    if rejected and on_requests:
        on_requests(rejected)
    stats = manager.stats()
    return ReplayResult(
        blocks=num_blocks,
        policy=policy,
        hit_blocks=stats.hit_blocks,
        hit_rate=stats.hit_blocks / trace.num_blocks,
        evictions=stats.evicted_blocks,
        manager_seconds=seconds,
        saved_tokens=stats.hit_blocks * trace.block_tokens,
        rejected_requests=rejected,
    )


def _run(manager: CacheManager, batch: list[tuple[TokenArray, int]]) -> float:
    """Serve (contents, full blocks) one after the other; returns the seconds it took."""
    name = "replayed"  # one at a time, so one name is enough
    began = perf_counter()
    for contents, num_full in batch:
        manager.open(name, contents)
        found = manager.match(name).num_tokens
        manager.allocate(name, len(contents) - found)
        manager.publish(name, num_full)
        manager.release(name)
    return perf_counter() - began


def _decode(decoder: msgspec.json.Decoder[_Line], text: str | bytes, where: str) -> _Line:
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f'{where} is no request: {error}; write {{"timestamp": 0, "input_length": 700, "hash_ids": [1, 2]}}'
        ) from None
    if line.input_length < 1 or not line.hash_ids:
        raise ConfigError(
            f"{where}: input_length {line.input_length} and {len(line.hash_ids)} hash_ids; both must be at least 1"
        )
    return line


def _derive_block_tokens(numbered: list[tuple[int, _Line]], name: str) -> int:
    """The only block size that fits every line; if several do, the only power of two among them.

    n hash ids for L tokens mean that the block has at least L / n and fewer than L / (n - 1) tokens.
    """
    low, low_line, high, high_line = 1, 0, 0, 0
    for number, line in numbered:
        length, count = line.input_length, len(line.hash_ids)
        if -(-length // count) > low:
            low, low_line = -(-length // count), number
        most = (length - 1) // (count - 1) if count > 1 else 0
        if most and (not high or most < high):
            high, high_line = most, number
        if length < count:
            raise ConfigError(f"{name} line {number}: {count} hash_ids for only {length} tokens")
        if high and low > high:
            raise ConfigError(
                f"{name} line {number}: no block size fits it and the lines before: line {low_line or number} needs at "
                f"least {low} tokens a block and line {high_line} at most {high}; every line has one hash id for each "
                "block, the last may be partial"
            )
    if low == high:
        return low
    powers = [1 << k for k in range(31) if low <= 1 << k <= (high or 2 * low - 1)]
    if len(powers) == 1:
        return powers[0]
    allowed = f"{low} to {high}" if high else f"{low} or more"
    raise ConfigError(f"{name} leaves the block size open ({allowed} tokens); say it with --block-tokens")
