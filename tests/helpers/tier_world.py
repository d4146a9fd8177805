"""A world for the TierManager: ranks whose memory holds the name of what was computed instead of KV, and a storage.

A block's right content is its prefix digest. Whatever the scheduler does, a block that match finds must hold it on
every rank; blocks that somebody was given are poisoned first, so that a copy that reads too late is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.scheduler_events import EventFollower

from fastkv.core.digest import NO_IDENTITY, Identity
from fastkv.core.spec import Level
from fastkv.core.transfers import TransferAck, TransferFailure, TransferPlan, check_plan
from fastkv.scheduler import CacheManager
from fastkv.scheduler.events import MEDIA
from fastkv.scheduler.tier_options import TierOptions, WritePolicy
from fastkv.scheduler.tiers import TierManager

POISON = b"poison"


class Rank:
    """One worker: memory by block id, plans that it has not carried out yet."""

    def __init__(self, rank: int, num_device: int, num_host: int, store: dict[tuple[int, bytes], bytes]) -> None:
        self.rank, self.store = rank, store
        self.device, self.host = [POISON] * num_device, [POISON] * num_host
        self.inbox: list[TransferPlan] = []

    def carry_out(self, plan: TransferPlan, fail_at: int = -1) -> TransferAck:
        """Copy block by block; fail_at is the copy (from 0) that fails and leaves garbage in its destination."""
        check_plan(plan, len(self.device), len(self.host))
        copies, landed = 0, b""
        for index, stage in enumerate(plan.stages):
            landed = b""
            digests = stage.digest_list()
            for i in range(stage.num_blocks):
                fails, copies = copies == fail_at, copies + 1
                if stage.touches_storage:
                    host = int(stage.ids(Level.HOST)[i])
                    landed += bytes([self._storage(stage.source, host, digests[i], fails)])
                    continue
                pair = [self._memory(level)[int(stage.ids(level)[i])] for level in (stage.source, stage.destination)]
                self._memory(stage.destination)[int(stage.ids(stage.destination)[i])] = POISON if fails else pair[0]
                if fails:
                    side = (stage.source, stage.destination)
                    return TransferAck(plan.plan_id, self.rank, TransferFailure(index, *side, (), -1, "on purpose"))
        return TransferAck(plan.plan_id, self.rank, None, landed)

    def _storage(self, source: Level, host: int, digest: bytes, fails: bool) -> bool:
        key = (self.rank, digest)
        if source is Level.HOST:
            if not fails:
                self.store[key] = self.host[host]
            return not fails
        self.host[host] = POISON if fails or key not in self.store else self.store[key]
        return not fails and key in self.store

    def _memory(self, level: Level) -> list[bytes]:
        return self.device if level is Level.DEVICE else self.host


@dataclass
class Job:
    """One open request: what it was opened with, and the load that its first step waits for."""

    tokens: list[int]
    identity: Identity
    load: int | None = None
    is_started: bool = False
    cached: int = 0  # tokens that are not computed again
    skip_host: bool = False


@dataclass
class TierWorld:
    """CacheManager, TierManager, ranks and storage, with requests that are driven step by step."""

    num_device: int
    block_size: int
    num_host: int
    options: TierOptions = field(default_factory=TierOptions)
    policy: str = "lru"
    store: dict[tuple[int, bytes], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = 0.0
        self.manager = CacheManager(
            self.num_device,
            self.block_size,
            num_host_blocks=self.num_host,
            policy=self.policy,
            record_events=True,
            clock=lambda: self.now,
        )
        self.follower = EventFollower()
        lookup = self if self.options.has_storage else None
        self.tiers = TierManager(self.manager, self.options, lookup, clock=lambda: self.now)
        ranks = range(self.options.num_ranks)
        self.ranks = [Rank(rank, self.num_device, self.num_host, self.store) for rank in ranks]
        self.lost: set[int] = set()
        self.jobs: dict[str, Job] = {}
        self.lies = 0  # blocks that storage pretends to have

    # -- storage's lookup half ----------------------------------------------------------------------------------

    def contains(self, digests: Sequence[bytes], deadline_s: float) -> int:
        for count, digest in enumerate(digests):
            if not all((rank.rank, digest) in self.store for rank in self.ranks):
                return min(len(digests), count + self.lies)
        return len(digests)

    # -- requests -----------------------------------------------------------------------------------------------

    def open(self, name: str, tokens: Sequence[int], identity: Identity = NO_IDENTITY) -> None:
        self.manager.open(name, list(tokens), identity)
        self.jobs[name] = Job(list(tokens), identity)

    def start(self, name: str) -> bool:
        """Match, allocate, load. False when there is no room, now or yet: then the request has nothing."""
        job = self.jobs[name]
        found = self.manager.match(name)
        self.expect_content(name, found.device_blocks.tolist(), found.host_blocks.tolist())
        cached = found.num_device_tokens if job.skip_host else found.num_tokens
        assert cached < len(job.tokens)
        needed = self.manager.blocks_needed(name, len(job.tokens))
        if not self.tiers.make_room(needed) or self.manager.try_allocate(name, needed) is None:
            self.manager.preempt(name)
            return False
        table = self.manager.block_table(name).tolist()
        for block in table[len(found.device_blocks) :]:
            for rank in self.ranks:
                rank.device[block] = POISON
        job.load = self.tiers.load([name]) if cached > found.num_device_tokens else None
        job.is_started, job.cached = True, cached
        self.send()
        return True

    def finish(self, name: str) -> bool:
        """The step over all tokens is done: compute, publish, offload. False when it is to be discarded."""
        job = self.jobs[name]
        table, digests = self.manager.block_table(name).tolist(), self.digests(name)
        if job.load is not None and not self.tiers.take_load(job.load):
            self.manager.preempt(name)
            job.is_started, job.load, job.skip_host = False, None, True
            return False
        job.load = None
        for block in range(job.cached // self.block_size, len(digests)):
            for rank in self.ranks:
                rank.device[table[block]] = digests[block]
        self.manager.publish(name, len(job.tokens))
        self.tiers.written(name)
        self.expect_content(name, self.manager.block_table(name).tolist()[: len(digests)], [])
        return True

    def release(self, name: str) -> None:
        del self.jobs[name]
        self.manager.release(name)

    def run(self, name: str, tokens: Sequence[int], identity: Identity = NO_IDENTITY) -> int:
        """A whole request, with every plan carried out at once; returns the tokens that were not computed."""
        self.open(name, tokens, identity)
        self.tiers.fetch(name)
        self.settle()
        for _ in range(50):
            if self.start(name):
                self.settle()
                if self.finish(name):
                    break
            self.settle()
        else:
            raise AssertionError(f"{name} never runs: {self.manager.stats()}")
        cached = self.jobs[name].cached
        self.release(name)
        self.settle()
        return cached

    # -- plans --------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Hand new plans to every rank that lives."""
        for plan in self.tiers.take_plans():
            for rank in self.ranks:
                if rank.rank not in self.lost:
                    rank.inbox.append(plan)

    def carry_out(self, rank: int, place: int = 0, fail_at: int = -1) -> None:
        """A rank carries out one of its plans and acknowledges it."""
        plan = self.ranks[rank].inbox.pop(place)
        self.tiers.acknowledge([self.ranks[rank].carry_out(plan, fail_at)])

    def lose(self, rank: int) -> None:
        """A rank dies with everything that it had to do."""
        self.lost.add(rank)
        self.ranks[rank].inbox.clear()
        self.tiers.lose_rank(rank)

    def settle(self) -> None:
        """Carry everything out until nothing is under way."""
        self.send()
        while any(rank.inbox for rank in self.ranks):
            for rank in self.ranks:
                while rank.inbox:
                    self.carry_out(rank.rank)
            self.send()

    # -- what must hold -----------------------------------------------------------------------------------------

    def digests(self, name: str) -> list[bytes]:
        return self.manager.prefix_digests(name)

    def expect_content(self, name: str, device: list[int], host: list[int]) -> None:
        """Blocks that a request found hold what its tokens say, on every rank."""
        digests = self.digests(name)
        for rank in self.ranks:
            if rank.rank in self.lost:
                continue
            held = [rank.device[block] for block in device] + [rank.host[block] for block in host]
            assert held == digests[: len(held)], f"{name} finds foreign bytes on rank {rank.rank}"

    def check_events(self) -> None:
        """Whoever followed the events knows what is findable at which level, and it is there on every rank."""
        self.follower.apply(self.manager.take_events())
        late = EventFollower()
        late.apply(self.manager.take_events(everything=True))
        assert self.follower.media == late.media
        for medium, level in zip(MEDIA, ("device", "host"), strict=True):
            said = {digest for digest, media in late.media.items() if medium in media}
            for rank in self.ranks:
                if rank.rank not in self.lost:
                    assert said <= set(getattr(rank, level)), f"rank {rank.rank} does not have what {medium} should"

    def check_idle(self) -> None:
        """Nothing is under way and nobody has anything: no block may be held at any level."""
        assert not self.jobs
        assert self.tiers.num_under_way == 0
        self.manager.check_integrity()
        self.check_events()
        for level in (0, 1):
            assert self.manager._counts(level)[3] == 0, f"level {level} leaks"
        assert self.manager._num_transfers() == 0


def text(name: int, num_blocks: int, block_size: int = 4) -> list[int]:
    """Tokens of whole blocks and one more, so that all of the blocks can be found."""
    return [1000 * name + i for i in range(num_blocks * block_size)] + [7]


def world(
    num_device: int = 4, num_host: int = 8, policy: WritePolicy = WritePolicy.WRITE_THROUGH, **options: object
) -> TierWorld:
    return TierWorld(num_device, 4, num_host, TierOptions(write_policy=policy, **options))  # type: ignore[arg-type]


def counts(one: TierWorld, level: Level) -> tuple[int, int, int]:
    """(free, evictable, held) blocks of a level."""
    return one.manager._counts(int(level))[1:4]
