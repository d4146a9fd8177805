"""Levels: what the engine has below the device, host and storage, put together from the config.

Owned by LLM. Makes the TierManager and storage's lookup half, and drives what concerns all levels at once: waiting for
copies, new weights, sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from fastkv import CacheManager, Config
from fastkv.core.messages import AnyMessage, Done, PollResult, ResetCache, SetWeightsVersion, Sleep, Wake, WorkerReady
from fastkv.engine.batcher import Batcher
from fastkv.engine.interrupts import let_signals_in
from fastkv.errors import InvariantError, RequestError
from fastkv.scheduler.tier_options import TierOptions, WritePolicy
from fastkv.scheduler.tiers import TierManager
from fastkv.storage import StorageNamespace, open_lookup
from fastkv.storage.deadline_lookup import DeadlineLookup
from fastkv.worker.storage_access import file_store_config

_POLL_S = 0.05
_ACK_MARGIN_S = 5.0  # the worker gives up first, and says why

Call = Callable[[AnyMessage], AnyMessage]


@dataclass(frozen=True, slots=True)
class Moved:
    """Blocks that moved between levels, and what did not work.

    Attributes:
        offloaded_blocks, loaded_blocks: device to host, host to device.
        stored_blocks, fetched_blocks: host to storage, storage to host.
        missed_blocks: storage said it had them and did not give them.
        failed_transfers: copies that failed; their blocks were computed again, or are not on the slower level.
    """

    offloaded_blocks: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    fetched_blocks: int = 0
    missed_blocks: int = 0
    failed_transfers: int = 0

    def __sub__(self, earlier: Moved) -> Moved:
        """What moved since then."""
        return Moved(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Moved)))


class Levels:
    """The levels of one engine.

    Args:
        config: how blocks move and where they are stored.
        ready: what the worker allocated and opened.
        manager: made with the worker's host blocks.
        call: sends the worker a message and returns its answer.

    Raises:
        ConfigError: storage that cannot be looked up.
    """

    def __init__(self, config: Config, ready: WorkerReady, manager: CacheManager, call: Call) -> None:
        self._config, self._manager, self._call = config, manager, call
        self._namespace = StorageNamespace.from_json(ready.storage_namespace) if ready.storage_namespace else None
        self._lookup = self._open_lookup()
        self.tiers = TierManager(manager, tier_options(config, has_storage=self._lookup is not None), self._lookup)
        self.storage_counters: dict[str, int] = {}
        self.storage_error = ""

    def moved(self) -> Moved:
        """What moved since the engine was made."""
        stats = self.tiers.stats
        return Moved(
            stats.offloaded_blocks,
            stats.loaded_blocks,
            stats.stored_blocks,
            stats.fetched_blocks,
            stats.missed_blocks,
            stats.failed_plans,
        )

    def settle(self, batcher: Batcher, timeout_s: float) -> bool:
        """Send what is planned and wait until nothing is under way; False if something still is after timeout_s.

        Also brings storage's counters up to date.
        """
        if self._lookup is not None:
            self.poll(batcher, 0.0)
        end_s = time.monotonic() + timeout_s
        while self.tiers.num_under_way:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            let_signals_in()
            self.poll(batcher, min(left_s, _POLL_S))
        return True

    def poll(self, batcher: Batcher, wait_s: float) -> None:
        """Send what is planned and take what is acknowledged within wait_s."""
        self.apply(batcher, self._call(batcher.poll(wait_s)))

    def apply(self, batcher: Batcher, answer: AnyMessage) -> None:
        """Take the answer to a Poll."""
        if not isinstance(answer, PollResult):
            raise InvariantError(f"a Poll was answered with {answer!r}")
        batcher.apply_poll(answer)
        self.storage_counters, self.storage_error = answer.storage_counters, answer.storage_error

    def set_weights_version(self, batcher: Batcher, version: str) -> None:
        """The weights changed: nothing older is found at any level.

        Raises:
            RequestError: the version is no non-empty str; nothing was changed.
            StorageError: storage cannot be opened for it; until a later call succeeds nothing is stored or found there.
        """
        self.tiers.set_weights_version(version)  # first: it refuses bad versions, and whatever fails later costs misses
        self.close()
        if self._namespace is not None:
            self._namespace = self._namespace.with_weights_version(version)
        try:
            self._expect_done(SetWeightsVersion(batcher.new_plan_id(), version))
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: the worker does it all the same
                self._use_lookup()
            raise
        self._use_lookup()

    def sleep(self, batcher: Batcher, *, release_host: bool) -> None:
        """Give the device caches' memory back, and the host's if asked; what they held is forgotten.

        Raises:
            RequestError: requests hold blocks, or copies do not end.
        """
        self.settle(batcher, self._config.cache.transfer_timeout_s)
        self.tiers.forget_device(host_too=release_host)
        self._expect_done(Sleep(batcher.new_plan_id(), release_host))

    def reset(self, batcher: Batcher) -> None:
        """Forget and zero what device and host hold.

        Raises:
            RequestError: requests are running, or copies do not end; nothing was forgotten.
        """
        if batcher.has_work:
            raise RequestError("requests are running; reset the prefix cache when they have finished")
        if not self.settle(batcher, self._config.cache.transfer_timeout_s):
            raise RequestError(f"{self.tiers.num_under_way} transfers do not end; nothing was forgotten")
        self._manager.reset()
        self._expect_done(ResetCache(batcher.new_plan_id()))

    def wake(self, batcher: Batcher) -> None:
        """Use the caches again."""
        self._expect_done(Wake(batcher.new_plan_id()))

    def close(self) -> None:
        """Close the lookup."""
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None

    def _expect_done(self, message: AnyMessage) -> None:
        answer = self._call(message)
        if not isinstance(answer, Done):
            raise InvariantError(f"{type(message).__name__} was answered with {answer!r}")

    def _use_lookup(self) -> None:
        self._lookup = self._open_lookup()
        self.tiers.use_lookup(self._lookup)

    def _open_lookup(self) -> DeadlineLookup | None:
        storage = self._config.storage
        if storage is None or self._namespace is None:
            return None
        lookup = open_lookup(file_store_config(self._config, storage), self._namespace)
        return DeadlineLookup(lookup, storage.failure_limit, storage.cooldown_s)


def tier_options(config: Config, *, has_storage: bool, num_ranks: int = 1) -> TierOptions:
    """How blocks move, as the config says."""
    cache, storage = config.cache, config.storage
    options = TierOptions(
        write_policy=WritePolicy(cache.write_policy),
        write_through_threshold=cache.write_through_threshold,
        num_ranks=num_ranks,
        transfer_timeout_s=cache.transfer_timeout_s + _ACK_MARGIN_S,
    )
    if storage is None or not has_storage:
        return options
    return replace(
        options,
        has_storage=True,
        store_timeout_s=storage.put_timeout_s + _ACK_MARGIN_S,
        fetch_timeout_s=storage.get_timeout_s,
        lookup_timeout_s=storage.lookup_timeout_s,
    )
