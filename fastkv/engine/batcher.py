"""Continuous batching: which tokens of which requests go into the next step. The scheduler's side, no paddle.

Owns the requests' progress; the CacheManager owns their blocks, the TierManager what moves below the device. Called by
the engine's loop, in turn:

    plan() -> StepPlan -> (worker) -> StepResult -> apply()
              Poll     -> (worker) -> PollResult -> apply_poll()      when only copies are under way

    waiting --plan--> running --last token--> finished
       ^---- preempt (out of blocks, or its load failed) --'

A step holds one token of every request that decodes and, within max_batch_tokens, chunks of prompts. A waiting request
whose next block is being computed by a running one is not started until that block is published, so that a shared
prefix is computed once; one whose blocks are on their way from storage waits for those.

A step that reads blocks from the host carries their load. If that fails, nothing of the step is used: its requests
compute the same tokens again, those that were to read the blocks without them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from fastkv.core.digest import NO_IDENTITY, Identity
from fastkv.core.messages import INT64, Poll, PollResult, SamplingParams, StepPlan, StepResult, pack, unpack
from fastkv.errors import InvariantError, RequestError, WorkerError
from fastkv.scheduler.manager import CacheManager
from fastkv.scheduler.tiers import TierManager

_POLL_S = 0.05  # how long the worker may wait for a copy to end when no step can run


@dataclass(slots=True, eq=False)
class Request:
    """One request and how far it is.

    Attributes:
        request_id: unique while the request lives.
        prompt: int32 token ids.
        sampling: how to pick tokens.
        max_tokens: tokens to generate at most.
        stop_ids: token ids that end the request; the stopping token is not part of the output.
        identity: what besides the tokens makes its KV what it is.
        output: tokens generated so far.
        computed: tokens whose KV is in the cache, or on its way from the host with the step in flight.
        published: tokens whose blocks others can find on the device.
        is_looked_up: storage was asked for its blocks.
        without_host: a load of it failed, so it starts from what the device has.
        hit_tokens: prompt tokens that were found in the cache when the request started; None before. What a
            preempted request finds again of its own is no hit.
        finish_reason: "stop", "length" or "" while it runs.
    """

    request_id: str
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    identity: Identity = NO_IDENTITY
    output: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0
    is_looked_up: bool = False
    without_host: bool = False
    hit_tokens: int | None = None
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Token ids start..stop of prompt and output."""
        if stop <= len(self.prompt):
            return self.prompt[start:stop]
        if start >= len(self.prompt):
            return np.asarray(self.output[start - len(self.prompt) : stop - len(self.prompt)], dtype=np.int32)
        return np.concatenate([self.prompt[start:], self.tokens(len(self.prompt), stop)])


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that a step produced. is_last tells that its request is finished; token is -1 if it only stopped."""

    request: Request
    token: int
    is_last: bool


class Batcher:
    """Plans steps over a CacheManager.

    Args:
        manager: the blocks.
        max_batch_size: requests in one step.
        max_batch_tokens: new tokens in one step.
        max_context: tokens of a prompt and its output together.
        tiers: the levels below the device; None: there are none.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_batch_size: int,
        max_batch_tokens: int,
        max_context: int,
        tiers: TierManager | None = None,
    ) -> None:
        self.manager = manager
        self.tiers = tiers or TierManager(manager)
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_context = max_context
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_step: list[tuple[Request, int]] = []
        self._loading: list[Request] = []  # requests of the step that read blocks from the host
        self._load: int | None = None  # the plan that brings those blocks
        self._plan_ids = count(1)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: empty, longer than the context or than the whole cache; nothing was queued.
        """
        self.check(request)
        self.manager.open(request.request_id, request.prompt, request.identity)
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuse a request that could never run. Raises RequestError."""
        prompt_tokens, name = len(request.prompt), request.request_id
        if not prompt_tokens:
            raise RequestError(f"{name}: the prompt is empty; give at least one token")
        if not isinstance(request.max_tokens, int) or request.max_tokens < 1:
            raise RequestError(f"{name}: max_tokens must be a whole number of at least 1, got {request.max_tokens!r}")
        if prompt_tokens >= self.max_context:
            raise RequestError(
                f"{name}: the prompt has {prompt_tokens} tokens, the model's context holds {self.max_context} with at "
                "least one to generate; shorten the prompt"
            )
        total = min(prompt_tokens + request.max_tokens, self.max_context)
        capacity = self.manager.stats().num_blocks * self.manager.block_size
        if total > capacity:
            raise RequestError(
                f"{name}: {prompt_tokens} prompt tokens and up to {total - prompt_tokens} new ones do not fit the "
                f"cache of {capacity} tokens; shorten the prompt, lower max_tokens or raise cache.device_memory"
            )

    def discard_step(self) -> None:
        """Forget the step in flight: it failed or was interrupted. Its requests compute their tokens again."""
        if self._load is not None:
            self.tiers.take_load(self._load)
        for request in self._loading:
            if request in self._running:
                self._running.remove(request)
                self._send_back(request)
                request.without_host, request.hit_tokens = True, None
        self._in_step, self._loading, self._load = [], [], None

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; its blocks are released. A step in flight ignores it."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            return
        self.tiers.forget(request.request_id)
        self.manager.release(request.request_id)

    def plan(self) -> StepPlan | Poll:
        """Choose the next step's tokens and give them blocks; a Poll when all that can be done is to wait for copies.

        Raises:
            InvariantError: there is no work, a step is in flight, or nothing can run.
            WorkerError: nothing can run, because of copies that the worker does not end.
        """
        if self._in_step or not self.has_work:
            raise InvariantError("plan() needs work and no step in flight")
        self.tiers.expire()
        self._look_up_waiting()
        budget = self.max_batch_tokens
        # Decoding requests first: one token each, and they alone may still need blocks (prompts got theirs at start).
        for request in sorted(self._running, key=lambda r: r.num_tokens - r.computed > 1):
            budget -= self._continue(request, budget)
        num_fetching = 0  # the host would not hold what a long queue of prompts has in storage
        for request in list(self._waiting):
            if budget < 1 or len(self._running) + num_fetching >= self.max_batch_size:
                break
            if self._shares_unpublished_block(request):
                continue
            if self._is_fetching(request):
                num_fetching += 1
                continue
            tokens = self._start(request, budget)
            if not tokens:
                break
            budget -= tokens
        if not self._in_step:
            if not self.tiers.num_under_way:
                raise InvariantError(f"no request can run: {self.manager.stats()}")
            if not self.tiers.num_hopeful:
                raise WorkerError(
                    f"no request can run: {self.tiers.num_under_way} transfers past their deadline hold the blocks "
                    f"that are missing ({self.tiers.stats.last_cause}); start the engine again"
                )
            return self.poll(_POLL_S)
        self.tiers.make_room(len(self._running))  # ahead of need: decoding requests will ask for a block each
        return self._build()

    def poll(self, wait_s: float) -> Poll:
        """A message that starts what is planned and asks what became of earlier copies."""
        return Poll(self.new_plan_id(), self.tiers.take_plans(), wait_s)

    def new_plan_id(self) -> int:
        """An id for a message to the worker; ids ascend."""
        return next(self._plan_ids)

    def apply_poll(self, result: PollResult) -> None:
        """Take the answer to a Poll."""
        self.tiers.acknowledge(result.acks)
        self.tiers.expire()

    def step_size(self) -> tuple[int, int]:
        """(prefill tokens, decode tokens) of the step in flight; a decode token is one that was just sampled."""
        decode = sum(bool(request.output) and num_tokens == 1 for request, num_tokens in self._in_step)
        return sum(num_tokens for _, num_tokens in self._in_step) - decode, decode

    def apply(self, result: StepResult) -> list[NewToken]:
        """Take a step's tokens: publish what was computed, extend or finish requests. Nothing if a load failed.

        Raises:
            InvariantError: the result is of another batch.
        """
        self.tiers.acknowledge(result.acks)
        self.tiers.expire()
        if result.is_discarded or (self._load is not None and not self.tiers.has_landed(self._load)):
            self.discard_step()
            return []
        if self._load is not None:
            self.tiers.take_load(self._load)
        tokens = unpack(result.tokens)
        if len(tokens) != len(self._in_step):
            raise InvariantError(f"{len(tokens)} results for a step of {len(self._in_step)} requests")
        events = []
        for (request, num_tokens), token in zip(self._in_step, tokens.tolist(), strict=True):
            if request not in self._running:
                continue  # aborted while the step was in flight
            request.computed += num_tokens
            self.manager.publish(request.request_id, request.computed)
            request.published = request.computed
            self.tiers.written(request.request_id)
            if token >= 0:
                events.append(self._take(request, token))
        self._in_step, self._loading, self._load = [], [], None
        return events

    def _take(self, request: Request, token: int) -> NewToken:
        if token in request.stop_ids:
            request.finish_reason = "stop"
            token = -1
        else:
            request.output.append(token)
            if len(request.output) >= request.max_tokens or request.num_tokens >= self.max_context:
                request.finish_reason = "length"
        if request.finish_reason:
            self._running.remove(request)
            self.manager.release(request.request_id)
        else:
            self.manager.append(request.request_id, [token])
        return NewToken(request, token, bool(request.finish_reason))

    def _continue(self, request: Request, budget: int) -> int:
        """Plan a running request's next tokens, preempting later ones if blocks are short. Returns tokens planned."""
        if request not in self._running:
            return 0  # preempted for an earlier one
        num_tokens = min(request.num_tokens - request.computed, budget)
        if num_tokens < 1:
            return 0
        while not (fits := self._fits(request, num_tokens)):
            if fits is None:
                return 0
            victim = self._running.pop()
            self._send_back(victim)
            if victim is request:
                return 0
        self._in_step.append((request, num_tokens))
        return num_tokens

    def _start(self, request: Request, budget: int) -> int:
        """Match a waiting request, give its whole prompt blocks, plan its first chunk. 0 leaves it waiting."""
        found = self.manager.match(request.request_id)
        request.published = found.num_device_tokens
        request.computed = request.published if request.without_host else found.num_tokens
        if not self._fits(request, request.num_tokens - request.computed):
            self.manager.preempt(request.request_id)
            request.computed = request.published = 0
            return 0
        if request.computed > request.published:
            self._loading.append(request)
        if request.hit_tokens is None:
            request.hit_tokens = request.computed
        num_tokens = min(request.num_tokens - request.computed, budget)
        self.tiers.forget(request.request_id)
        self._waiting.remove(request)
        self._running.append(request)
        self._in_step.append((request, num_tokens))
        return num_tokens

    def _fits(self, request: Request, num_tokens: int) -> bool | None:
        """Allocate what the tokens need. None: not yet, what would be evicted is being written back."""
        needed = self.manager.blocks_needed(request.request_id, request.computed + num_tokens)
        if not self.tiers.make_room(needed):
            return None
        return self.manager.try_allocate(request.request_id, needed) is not None

    def _send_back(self, request: Request) -> None:
        """A request that runs no more gives up its blocks and waits, first in line."""
        self.manager.preempt(request.request_id)
        request.computed = request.published = 0
        request.is_looked_up = False
        self._waiting.appendleft(request)

    def _look_up_waiting(self) -> None:
        """Ask storage for the blocks of the requests that start next, so that they come while the requests wait."""
        for request in islice(self._waiting, self.max_batch_size):
            self._is_fetching(request)

    def _is_fetching(self, request: Request) -> bool:
        """Whether a waiting request waits for blocks from storage; asks storage for them once."""
        if not request.is_looked_up and not request.without_host:
            request.is_looked_up = True
            return self.tiers.fetch(request.request_id)
        return self.tiers.is_fetching(request.request_id)

    def _shares_unpublished_block(self, request: Request) -> bool:
        """Whether a running request is about to publish a block that this one starts with."""
        if not self.manager.enable_prefix_caching:
            return False
        size = self.manager.block_size
        limit = (request.num_tokens - 1) // size * size
        for other in self._running:
            if other.identity != request.identity:
                continue
            start = min(other.computed, other.published) // size * size
            stop = min(limit, other.num_tokens // size * size)
            if stop > start and _common_prefix(request, other, stop) >= start + size:
                return True
        return False

    def _build(self) -> StepPlan:
        size = self.manager.block_size
        tables = [self.manager.block_table(request.request_id) for request, _ in self._in_step]
        max_blocks = max(len(table) for table in tables)
        block_tables = np.full((len(tables), max_blocks), -1, dtype=np.int32)
        tokens, slots, starts = [], [], [0]
        for row, (request, num_tokens) in enumerate(self._in_step):
            table = tables[row]
            block_tables[row, : len(table)] = table
            positions = np.arange(request.computed, request.computed + num_tokens)
            slots.append(table[positions // size].astype(np.int64) * size + positions % size)
            tokens.append(request.tokens(request.computed, request.computed + num_tokens))
            starts.append(starts[-1] + num_tokens)
        self._load = self.tiers.load([request.request_id for request in self._loading])
        completes = [request.computed + n == request.num_tokens for request, n in self._in_step]
        return StepPlan(
            plan_id=self.new_plan_id(),
            token_ids=pack(np.concatenate(tokens)),
            query_start=pack(starts),
            context_lens=pack([request.computed for request, _ in self._in_step]),
            slot_mapping=pack(np.concatenate(slots), INT64),
            block_tables=pack(block_tables),
            max_blocks=max_blocks,
            sampling=tuple(
                request.sampling if complete else None
                for (request, _), complete in zip(self._in_step, completes, strict=True)
            ),
            sampled_positions=pack([request.num_tokens for request, _ in self._in_step]),
            transfers=self.tiers.take_plans(),
            loads=() if self._load is None else (self._load,),
        )


def _common_prefix(first: Request, second: Request, limit: int) -> int:
    """Tokens, up to limit, that two requests start with alike."""
    differs = np.flatnonzero(first.tokens(0, limit) != second.tokens(0, limit))
    return int(differs[0]) if len(differs) else limit
