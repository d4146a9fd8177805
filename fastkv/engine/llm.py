"""LLM: text in, text out. The front end that ties tokenizer, batcher and worker together.

Called by `fastkv generate` and by offline scripts. Owns the CacheManager (through its batcher), the levels below the
device, and the worker's transport; scheduler and worker meet only in messages.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fastkv import CacheManager, Config, RequestError
from fastkv.config import KVEventsConfig
from fastkv.core.digest import as_token_array
from fastkv.core.messages import Poll, SamplingParams, StepResult
from fastkv.engine.batcher import Batcher, NewToken, Request
from fastkv.engine.interrupts import in_turn, interruptible, let_signals_in
from fastkv.engine.levels import Levels, Moved
from fastkv.engine.model_files import load_tokenizer
from fastkv.engine.report import Generation, Meter, Output, Prompt, Report
from fastkv.engine.sampler import check_sampling
from fastkv.engine.tokenizer import ChatMessage, Tokenizer
from fastkv.engine.transport import InlineWorker, ProcessWorker, WorkerTransport
from fastkv.errors import ConfigError, InvariantError, WorkerError
from fastkv.scheduler.events import EventBatch, EventStream, Publisher, ZmqPublisher

_SETTLE_S = 2.0  # how long generate waits at its end for copies to host and storage; later ones go on by themselves

TRANSPORTS: dict[str, type[InlineWorker] | type[ProcessWorker]] = {"inline": InlineWorker, "process": ProcessWorker}


class LLM:
    """An engine for offline generation. Use as a context manager, or close it. Threads that call it take turns.

    Args:
        config: from `fastkv.load_config`.
        worker: "inline", or "process" for a worker process of its own.

    Raises:
        ConfigError: whatever does not fit at start: model, cache, scales, memory.
    """

    def __init__(self, config: Config, worker: str = "inline") -> None:
        if worker not in TRANSPORTS:
            raise ConfigError(f"unknown worker {worker!r}; allowed: {', '.join(TRANSPORTS)}")
        self.config, self.worker_kind = config, worker
        self._tokenizer: Tokenizer | None = None
        with contextlib.ExitStack() as undo:
            self._transport: WorkerTransport = TRANSPORTS[worker](config)
            undo.callback(self._transport.close)
            # The planner, the spec and the worker have checked whatever the manager could refuse.
            self.manager = CacheManager(
                self._transport.ready.num_device_blocks,
                config.cache.block_size,
                enable_prefix_caching=config.cache.enable_prefix_caching,
                num_host_blocks=self._transport.ready.num_host_blocks,
                policy=config.cache.eviction_policy,
                record_events=config.kv_events is not None,
            )
            self._levels = Levels(config, self._transport.ready, self.manager, self._transport.call)
            undo.callback(self._levels.close)
            self._events = None if config.kv_events is None else _open_events(config.kv_events, self.manager)
            undo.pop_all()
        self._batcher = Batcher(
            self.manager,
            config.scheduler.max_batch_size,
            config.scheduler.max_batch_tokens,
            config.model.max_context,
            self._levels.tiers,
        )
        self._next_id, self.turn = 0, threading.RLock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @in_turn
    def close(self) -> None:
        """Store what is on its way to storage, free the worker's memory and end its process. Legal twice.

        Raises:
            TransferError: copies do not end, so their memory stays.
            StorageError: the storage backend is stuck in a call; what was queued is not stored.
        """
        storage = self.config.storage
        events, self._events = self._events, None
        with contextlib.ExitStack() as ends:  # in reverse order, each of them whatever the others do
            ends.callback(self._transport.close)
            ends.callback(self._levels.close)
            if events is not None:
                ends.callback(events.close)
            with contextlib.suppress(WorkerError):  # the worker may be gone: then nothing is left to wait for
                self._levels.settle(self._batcher, _SETTLE_S if storage is None else storage.put_timeout_s)

    def subscribe_kv_events(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Call back, once a step, with what became findable or ceased to be; returns what ends the subscription.

        Ctrl-C interrupts a callback that takes long; the other ones get their batch all the same.

        Raises:
            ConfigError: the config has no kv_events section, so nothing is recorded.
        """
        if self._events is None:
            raise ConfigError("KV events are not recorded; add a kv_events section (it may be empty: {}) to the config")

        def call(batch: EventBatch) -> None:
            with interruptible():  # a stranger's code, which may wait for ever
                callback(batch)

        return self._events.subscribe(call)

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Forget everything that the device and the host hold, and zero it. What storage has is found again.

        Raises:
            RequestError: requests are running, or copies do not end; nothing was forgotten.
        """
        self._levels.reset(self._batcher)
        self._flush_events()

    @in_turn
    def set_weights_version(self, version: str) -> None:
        """Say that the model's weights changed: nothing that was cached before is found again, at any level.

        Raises:
            RequestError: the version is no non-empty str.
            StorageError: storage cannot be opened for it.
        """
        try:
            self._levels.set_weights_version(self._batcher, version)
        finally:
            self._flush_events()

    @in_turn
    def sleep(self, *, release_host: bool = False) -> None:
        """Give the device caches' memory back to the system until `wake`, and with release_host the host cache's.

        Blocks that the host keeps, or storage has, are found again afterwards.

        Raises:
            RequestError: copies do not end.
        """
        self._levels.sleep(self._batcher, release_host=release_host)
        self._flush_events()

    @in_turn
    def wake(self) -> None:
        """Take the memory again after `sleep`."""
        self._levels.wake(self._batcher)

    def _flush_events(self) -> None:
        if self._events is not None:
            let_signals_in()  # before the events are taken, not in a subscriber's place
            self._events.flush()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when text is first used.

        Raises:
            ConfigError: the model brings none (random weights).
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config)
        return self._tokenizer

    @in_turn
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 64,
        sampling: SamplingParams | None = None,
        chat: bool = False,
        on_text: Callable[[int, str], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Complete prompts, all of them in one continuous batch. Ctrl-C ends it and leaves the engine usable.

        Args:
            prompts: texts, or lists of token ids.
            max_tokens: tokens to generate for each prompt at most.
            sampling: greedy when None.
            chat: wrap each text as a user's turn of a conversation.
            on_text: called with (index of the prompt, new text) as text arrives; whole characters only.
            on_progress: called with (prompts finished, tokens generated) after each step.

        Raises:
            RequestError: a prompt that is empty, longer than the context or than the cache; nothing was generated.
            WorkerError: the worker died.
        """
        sampling = sampling or SamplingParams()
        check_sampling(sampling)
        requests = self._requests(prompts, max_tokens, sampling, chat)
        index = {request.request_id: i for i, request in enumerate(requests)}
        streams = [self.tokenizer.stream() for _ in requests] if on_text else []
        meter, moved = Meter(), self._levels.moved()
        try:
            for request in requests:
                self._batcher.add(request)
            while self._batcher.has_work:
                events = self._step(meter)
                with interruptible():
                    if on_text:
                        for event in events:
                            i = index[event.request.request_id]
                            text = streams[i].feed(event.token) if event.token >= 0 else ""
                            on_text(i, text + (streams[i].finish() if event.is_last else ""))
                    if on_progress:
                        on_progress(sum(bool(r.finish_reason) for r in requests), sum(len(r.output) for r in requests))
        except BaseException:
            self._batcher.discard_step()
            for request in requests:
                self._batcher.abort(request)
            raise
        self._levels.settle(self._batcher, _SETTLE_S)
        self._flush_events()
        outputs = [self._output(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
        return Generation(outputs, self._report(requests, meter, self._levels.moved() - moved))

    def _requests(
        self, prompts: Sequence[Prompt], max_tokens: int, sampling: SamplingParams, chat: bool
    ) -> list[Request]:
        if isinstance(prompts, str) or not isinstance(prompts, (Sequence, np.ndarray)):
            raise RequestError(f"prompts is a {type(prompts).__name__}; give a list of prompts")
        requests = []
        for i, prompt in enumerate(prompts):
            let_signals_in()  # there may be many, and nothing is booked yet
            request = Request(
                request_id=f"request-{self._next_id + i}",
                prompt=self._encode(prompt, chat),
                sampling=sampling,
                max_tokens=max_tokens,
                stop_ids=self.tokenizer.stop_ids if isinstance(prompt, str) else frozenset(),
            )
            self._batcher.check(request)
            requests.append(request)
        self._next_id += len(requests)
        return requests

    def _encode(self, prompt: Prompt, chat: bool) -> npt.NDArray[np.int32]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise RequestError("the prompt is empty; give some text")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is no text that can be encoded: {error}") from None
            tokenizer = self.tokenizer
            return as_token_array(
                tokenizer.encode_chat([ChatMessage("user", prompt)]) if chat else tokenizer.encode(prompt)
            )
        tokens = as_token_array(prompt)
        vocab_size = self._transport.ready.vocab_size
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise RequestError(f"token id {int(tokens.max())} is outside the vocabulary: 0 to {vocab_size - 1}")
        return tokens

    def _step(self, meter: Meter) -> list[NewToken]:
        plan = self._batcher.plan()
        if isinstance(plan, Poll):
            self._levels.apply(self._batcher, self._transport.call(plan))
            self._flush_events()
            return []
        meter.peak_blocks = max(meter.peak_blocks, self.manager.stats().held)
        result = self._transport.call(plan)
        if not isinstance(result, StepResult) or result.plan_id != plan.plan_id:
            raise InvariantError(f"step {plan.plan_id} was answered with {result!r}")
        meter.count(*self._batcher.step_size(), result.seconds)
        tokens = self._batcher.apply(result)
        self._flush_events()
        return tokens

    def _output(self, prompt: Prompt, request: Request) -> Output:
        text = self.tokenizer.decode(request.output) if isinstance(prompt, str) else ""
        return Output(prompt, text, request.output, request.finish_reason, len(request.prompt), request.hit_tokens or 0)

    def _report(self, requests: Sequence[Request], meter: Meter, moved: Moved) -> Report:
        ready = self._transport.ready
        return Report(
            storage_dtype=ready.storage_dtype,
            cache_manager=self.config.cache.manager,
            kv_cache_quant_type=self.config.cache_spec().storage.name,
            worker=self.worker_kind,
            device_cache_bytes=ready.device_cache_bytes,
            mtp_cache_bytes=ready.mtp_cache_bytes,
            host_cache_bytes=ready.host_cache_bytes,
            num_blocks=ready.num_device_blocks,
            block_size=self.config.cache.block_size,
            peak_blocks=meter.peak_blocks,
            prompt_tokens=sum(len(request.prompt) for request in requests),
            prefix_hit_tokens=sum(request.hit_tokens or 0 for request in requests),
            prefill_tokens=meter.prefill_tokens,
            output_tokens=sum(len(request.output) for request in requests),
            prefill_tokens_per_s=meter.prefill_tokens / meter.prefill_s if meter.prefill_s else 0.0,
            decode_tokens_per_s=meter.decode_tokens / meter.decode_s if meter.decode_s else 0.0,
            write_policy=self.config.cache.write_policy,
            moved=moved,
            storage_counters=self._levels.storage_counters,
            storage_error=self._levels.storage_error,
            transfer_error=self._levels.tiers.stats.last_cause,
        )


def _open_events(config: KVEventsConfig, manager: CacheManager) -> EventStream:
    """The manager's events, on their way to the configured sockets. Raises ConfigError."""
    publishers: list[Publisher] = []
    if config.endpoint is not None:
        publisher = ZmqPublisher(
            config.endpoint,
            replay_endpoint=config.replay_endpoint,
            topic=config.topic,
            shape=config.shape,
            int_hashes=config.int_hashes,
        )
        publishers.append(publisher)
    return EventStream(manager.take_events, publishers)
