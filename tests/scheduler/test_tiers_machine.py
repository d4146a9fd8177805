"""TierManager against ranks with real contents, in any order of requests, copies, failures, losses and updates.

After each call the books are checked; whatever a request finds holds its bytes on every rank that lives; at the end
everything settles and nothing leaks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

import pytest
from helpers.tier_world import TierWorld
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastkv.errors import RequestError
from fastkv.scheduler.tier_options import TierOptions, WritePolicy

TEXTS = st.integers(1, 4)
PLACES = st.integers(0, 3)


class TierMachine(RuleBasedStateMachine):
    write_policy = WritePolicy.WRITE_THROUGH
    policy = "lru"

    @initialize(
        num_device=st.integers(3, 9),
        block_size=st.sampled_from([1, 2, 4]),
        num_host=st.integers(1, 8),
        num_ranks=st.integers(1, 2),
        has_storage=st.booleans(),
        lies=st.sampled_from([0, 0, 2]),
    )
    def begin(
        self, num_device: int, block_size: int, num_host: int, num_ranks: int, has_storage: bool, lies: int
    ) -> None:
        options = TierOptions(
            write_policy=self.write_policy,
            write_through_threshold=1,
            num_ranks=num_ranks,
            has_storage=has_storage,
            transfer_timeout_s=10,
            store_timeout_s=20,
            fetch_timeout_s=5,
        )
        self.world = TierWorld(num_device, block_size, num_host, options, self.policy)
        self.world.lies = lies
        self.version = self.opened = 0

    def pick(self, place: int, is_started: bool | None = None) -> str | None:
        """One of the open requests, if there is one."""
        names = [name for name, job in self.world.jobs.items() if is_started in (None, job.is_started)]
        return names[place % len(names)] if names else None

    @rule(text=TEXTS, length=st.integers(1, 14), fetch=st.booleans(), start=st.booleans())
    def open(self, text: int, length: int, fetch: bool, start: bool) -> None:
        """Prompts are prefixes of a few texts that begin alike, so that they share blocks."""
        world = self.world
        if len(world.jobs) == 4:
            return
        self.opened += 1
        name = f"request-{self.opened}"
        length = min(length, world.num_device * world.block_size)
        world.open(name, [0 if i < 5 else text for i in range(length)])
        if fetch:
            world.tiers.fetch(name)
            world.send()
        if start:
            world.start(name)

    @rule(place=PLACES)
    def start(self, place: int) -> None:
        name = self.pick(place, False)
        if name:
            self.world.start(name)

    @rule(place=PLACES, release=st.booleans())
    def finish(self, place: int, release: bool) -> None:
        """Also before the load is over: then the step is discarded, as one that stalled."""
        name = self.pick(place, True)
        if not name:
            return
        job = self.world.jobs[name]
        if job.cached < len(job.tokens) and self.world.finish(name):
            job.cached = len(job.tokens)
        if release:
            self.world.release(name)
        self.world.send()

    @rule(text=TEXTS, length=st.integers(1, 14))
    def run(self, text: int, length: int) -> None:
        """A whole request while nothing else runs, with everything carried out at once."""
        world = self.world
        for name in list(world.jobs):
            world.release(name)
        world.settle()
        self.opened += 1
        length = min(length, world.num_device * world.block_size)
        world.run(f"request-{self.opened}", [0 if i < 5 else text for i in range(length)])

    @rule(place=PLACES)
    def release(self, place: int) -> None:
        """At any point: finished, aborted, while blocks are being copied."""
        name = self.pick(place)
        if name:
            self.world.release(name)

    @rule(place=PLACES)
    def preempt(self, place: int) -> None:
        name = self.pick(place, True)
        if name:
            self.world.manager.preempt(name)
            self.world.jobs[name].is_started, self.world.jobs[name].load = False, None

    @rule(rank=st.integers(0, 1), place=st.integers(0, 5), fail_at=st.sampled_from([-1, -1, -1, 0, 1, 2]))
    def carry_out(self, rank: int, place: int, fail_at: int) -> None:
        ranks = self.world.ranks
        if rank < len(ranks) and ranks[rank].inbox:
            self.world.carry_out(rank, place % len(ranks[rank].inbox), fail_at)
            self.world.send()

    @rule(seconds=st.sampled_from([1, 6, 30]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.tiers.expire()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule()
    def update_weights(self) -> None:
        """Whatever was computed before is never found again; requests that computed with old weights start again."""
        world = self.world
        self.version += 1
        world.tiers.set_weights_version(str(self.version))
        world.tiers.use_lookup(world if world.options.has_storage else None)
        for name in list(world.jobs):
            world.release(name)

    @rule(host_too=st.booleans())
    def sleep(self, host_too: bool) -> None:
        world = self.world
        busy = world.tiers.num_under_way > 0
        held = any(job.is_started for job in world.jobs.values())
        if busy or held:
            with pytest.raises(RequestError):
                world.tiers.forget_device(host_too=host_too)
            return
        world.tiers.forget_device(host_too=host_too)
        for rank in world.ranks:
            rank.device[:] = [b"asleep"] * len(rank.device)
            if host_too:
                rank.host[:] = [b"asleep"] * len(rank.host)

    @invariant()
    def books_are_right(self) -> None:
        self.world.manager.check_integrity()

    @rule()
    def read_events(self) -> None:
        """Kind "events": through duplicates, copies, demotion, failures and updates."""
        self.world.check_events()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in list(self.world.jobs):
            self.world.release(name)
        self.world.settle()
        self.world.check_idle()


class SelectiveMachine(TierMachine):
    write_policy = WritePolicy.WRITE_THROUGH_SELECTIVE


class WriteBackMachine(TierMachine):
    write_policy = WritePolicy.WRITE_BACK


class TwoQueueMachine(WriteBackMachine):
    policy = "2q"


def walk(seed: int, write_policy: WritePolicy, policy: str, num_steps: int) -> TierWorld:
    """The same calls in a random order that is made to fill the levels: deep where the state machine is broad."""
    rng = random.Random(seed)
    machine = TierMachine()
    machine.write_policy, machine.policy = write_policy, policy
    machine.begin(
        num_device=rng.randint(3, 9),
        block_size=rng.choice([1, 2, 4]),
        num_host=rng.randint(1, 12),
        num_ranks=rng.randint(1, 2),
        has_storage=rng.random() < 0.7,
        lies=rng.choice([0, 0, 2]),
    )
    is_calm = rng.random() < 0.5  # otherwise things fail
    calls: list[tuple[int, Callable[[], None]]] = [
        (60, lambda: machine.open(rng.randint(1, 4), rng.randint(1, 14), rng.random() < 0.6, rng.random() < 0.6)),
        (40, lambda: machine.start(rng.randint(0, 3))),
        (70, lambda: machine.finish(rng.randint(0, 3), rng.random() < 0.7)),
        (20, lambda: machine.run(rng.randint(1, 4), rng.randint(1, 14))),
        (10, lambda: machine.release(rng.randint(0, 3))),
        (5, lambda: machine.preempt(rng.randint(0, 3))),
        (100, lambda: machine.carry_out(rng.randint(0, 1), rng.randint(0, 5), -1 if is_calm else rng.randint(-5, 2))),
        (10, lambda: machine.wait(rng.choice([1, 1, 6, 30]))),
        (10, machine.settle),
        (20, machine.read_events),
    ]
    if not is_calm:
        calls += [(1, machine.update_weights), (2, lambda: machine.sleep(rng.random() < 0.5))]
    weights = [weight for weight, _ in calls]
    for _ in range(num_steps):
        rng.choices(calls, weights)[0][1]()
        machine.books_are_right()
    machine.teardown()
    return machine.world


@pytest.mark.parametrize("policy", ["lru", "2q"])
@pytest.mark.parametrize("write_policy", list(WritePolicy))
def test_accounting_under_load_twenty_thousand_steps_leave_nothing_behind(
    write_policy: WritePolicy, policy: str
) -> None:
    """Kind "accounting under load", with copies, failures, updates and sleep in between."""
    total: Counter[str] = Counter()
    for seed in range(100):
        stats = walk(seed, write_policy, policy, 200).tiers.stats
        total.update({key: value for key, value in asdict(stats).items() if isinstance(value, int)})
    assert all(total.values()), total  # everything happened


_quick = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
for _machine in (TierMachine, SelectiveMachine, WriteBackMachine, TwoQueueMachine):
    _machine.TestCase.settings = _quick
TestWriteThrough = TierMachine.TestCase
TestSelective = SelectiveMachine.TestCase
TestWriteBack = WriteBackMachine.TestCase
TestTwoQueue = TwoQueueMachine.TestCase
