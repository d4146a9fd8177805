"""The CacheManager against an obviously correct model: any order of calls, check_integrity after each.

Run for each eviction policy, and with a fast hash that always collides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.scheduler_events import EventFollower
from helpers.scheduler_model import ModelRequest, SchedulerModel
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastkv.core.digest import Identity, ImageSpan
from fastkv.errors import OutOfBlocksError, RequestError
from fastkv.scheduler import CacheManager

REQUEST_IDS = st.sampled_from(["a", "b", "c", "d"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
IMAGES = st.sampled_from([(), (), (), (), (b"x", 0, 1), (b"x", 1, 5), (b"y", 1, 5), (b"x", 2, 4), (b"x", 4, 8)])


class ManagerMachine(RuleBasedStateMachine):
    policy = "lru"
    hash_mask = 2**64 - 1

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.sampled_from([True] * 4 + [False]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.manager = CacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            policy=self.policy,
            max_pinned_blocks=3,
            record_events=True,
            clock=lambda: self.model.now,
            hash_mask=self.hash_mask,
        )
        self.model = SchedulerModel(num_blocks, block_size, caching, self.policy, 3)
        self.follower = EventFollower()

    def request(self, request_id: str) -> ModelRequest | None:
        return self.model.requests.get(request_id)

    def unknown(self, request_id: str, call: Callable[[], object]) -> bool:
        """Whether the id is not open; then the call must say so."""
        if request_id in self.model.requests:
            return False
        with pytest.raises(RequestError, match="is not open"):
            call()
        return True

    @rule(
        request_id=REQUEST_IDS,
        tokens=TOKENS,
        salt=st.sampled_from(["", "", "s"]),
        image=IMAGES,
        priority=st.sampled_from([0, 0, 0, 1, 2, 7]),
        ttl=st.sampled_from([1, 2, 5]),
    )
    def open(self, request_id: str, tokens: list[int], salt: str, image: tuple, priority: int, ttl: int) -> None:
        images = (ImageSpan(*image),) if image and image[2] <= len(tokens) else ()
        identity = Identity(salt=salt, images=images)
        if self.request(request_id):
            with pytest.raises(RequestError, match="is open already"):
                self.manager.open(request_id, tokens, identity)
        else:
            self.manager.open(request_id, tokens, identity, priority=priority, priority_ttl_s=ttl)
            self.model.open(request_id, tokens, identity, priority, ttl)

    @rule(request_id=REQUEST_IDS)
    def match(self, request_id: str) -> None:
        if self.unknown(request_id, lambda: self.manager.match(request_id)):
            return
        request = self.model.requests[request_id]
        if request.own or request.computed > len(request.path) * self.model.block_size:
            with pytest.raises(RequestError, match="blocks of its own"):
                self.manager.match(request_id)
            return
        found = self.manager.match(request_id)
        assert len(found.device_blocks) == self.model.match(request_id)
        assert found.device_blocks.tolist() == request.table
        assert found.num_tokens == found.num_device_tokens == request.computed < len(request.tokens)

    @rule(request_id=REQUEST_IDS, count=st.integers(-1, 9), into_row=st.booleans())
    def allocate(self, request_id: str, count: int, into_row: bool) -> None:
        if self.unknown(request_id, lambda: self.manager.allocate(request_id, count)):
            return
        self.model_tick()
        if count < 0:
            with pytest.raises(RequestError):
                self.manager.allocate(request_id, count)
        elif count > self.model.available():
            assert self.manager.try_allocate(request_id, count) is None
            assert not self.manager.try_allocate_into(request_id, count, np.empty(40, dtype=np.int32))
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(request_id, count)
        elif into_row:
            row = np.full(40, -7, dtype=np.int32)
            before = len(self.model.requests[request_id].table)
            assert self.manager.try_allocate_into(request_id, count, row)
            self.model.allocate(request_id, count, row[before : before + count].tolist())
            assert (np.delete(row, range(before, before + count)) == -7).all()
        else:
            self.model.allocate(request_id, count, self.manager.allocate(request_id, count).tolist())

    @rule(request_id=REQUEST_IDS, tokens=st.lists(st.integers(0, 1), max_size=3))
    def append(self, request_id: str, tokens: list[int]) -> None:
        if not self.unknown(request_id, lambda: self.manager.append(request_id, tokens)):
            self.manager.append(request_id, tokens)
            self.model.requests[request_id].tokens += tokens

    @rule(request_id=REQUEST_IDS, drafts=st.integers(0, 5), accepted=st.lists(st.integers(0, 1), max_size=4))
    def speculate(self, request_id: str, drafts: int, accepted: list[int]) -> None:
        if self.unknown(request_id, lambda: self.manager.reserve_drafts(request_id, drafts)):
            return
        request = self.model.requests[request_id]
        self.model_tick()
        needed = max(0, -(-(len(request.tokens) + drafts) // self.model.block_size) - len(request.table))
        ids = self.manager.reserve_drafts(request_id, drafts)
        if ids is None:
            assert needed > self.model.available()
            return
        self.model.allocate(request_id, needed, ids.tolist())
        accepted = accepted[:drafts]
        given_back = self.manager.confirm(request_id, accepted)
        request.tokens += accepted
        assert given_back == self.model.trim(request_id)

    @rule(request_id=REQUEST_IDS, data=st.data())
    def publish(self, request_id: str, data: st.DataObject) -> None:
        if self.unknown(request_id, lambda: self.manager.publish(request_id, 0)):
            return
        request = self.model.requests[request_id]
        limit = min(len(request.tokens), len(request.table) * self.model.block_size)
        computed = data.draw(st.integers(max(0, request.computed - 1), limit + 1))
        if not request.computed <= computed <= limit:
            with pytest.raises(RequestError, match="computed tokens"):
                self.manager.publish(request_id, computed)
        else:
            assert self.manager.publish(request_id, computed) == self.model.publish(request_id, computed)

    @rule(request_id=REQUEST_IDS, data=st.data())
    def compute_all(self, request_id: str, data: st.DataObject) -> None:
        """What most requests do: match, allocate the rest, compute everything, and be done."""
        request = self.request(request_id)
        if request is None or request.own or request.computed:
            return
        self.match(request_id)
        self.model_tick()
        needed = self.manager.blocks_needed(request_id, len(request.tokens))
        if needed > self.model.available():
            return
        self.model.allocate(request_id, needed, self.manager.allocate(request_id, needed).tolist())
        assert self.manager.publish(request_id, len(request.tokens)) == self.model.publish(
            request_id, len(request.tokens)
        )
        if data.draw(st.booleans()):
            self.let_go(request_id, "release")

    @rule(request_id=REQUEST_IDS, how=st.sampled_from(["release", "preempt"]))
    def let_go(self, request_id: str, how: str) -> None:
        if self.unknown(request_id, lambda: getattr(self.manager, how)(request_id)):
            return
        self.model_tick()
        getattr(self.manager, how)(request_id)
        getattr(self.model, how)(request_id)

    @rule(parent_id=REQUEST_IDS, child_id=REQUEST_IDS)
    def fork(self, parent_id: str, child_id: str) -> None:
        if self.unknown(parent_id, lambda: self.manager.fork(parent_id, child_id)):
            return
        self.model_tick()
        if child_id in self.model.requests:
            with pytest.raises(RequestError, match="open already"):
                self.manager.fork(parent_id, child_id)
        elif self.model.requests[parent_id].computed % self.model.block_size and not self.model.available():
            with pytest.raises(OutOfBlocksError):
                self.manager.fork(parent_id, child_id)
        else:
            copies = [(copy.source, copy.target) for copy in self.manager.fork(parent_id, child_id)]
            self.model.fork(parent_id, child_id, copies)

    @rule(request_id=REQUEST_IDS, num_blocks=st.integers(1, 3))
    def pin(self, request_id: str, num_blocks: int) -> None:
        if self.unknown(request_id, lambda: self.manager.pin(request_id)):
            return
        path = self.model.requests[request_id].path[:num_blocks]
        legal = len(path) == num_blocks and all(block.findable for block in path)
        if not legal or len(self.model.pinned() | set(path)) > self.model.max_pinned:
            with pytest.raises(RequestError, match="pin"):
                self.manager.pin(request_id, num_blocks)
        else:
            self.model.pin(request_id, self.manager.pin(request_id, num_blocks), num_blocks)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from([*self.model.pins, 999]))
        self.model_tick()
        if pin == 999:
            with pytest.raises(RequestError, match="pin 999 is not known"):
                self.manager.unpin(pin)
        else:
            self.manager.unpin(pin)
            self.model.unpin(pin)

    @rule(num_blocks=st.integers(-1, 3))
    def evict(self, num_blocks: int) -> None:
        self.model_tick()
        if num_blocks < 0:
            with pytest.raises(RequestError, match="-1 blocks"):
                self.manager.evict(num_blocks)
            return
        for _ in range(self.manager.evict(num_blocks)):
            self.model.evict_one()
            num_blocks -= 1
        assert not num_blocks or not self.model.evictable()

    @rule(num_blocks=st.integers(1, 14), drain=st.booleans())
    def resize(self, num_blocks: int, drain: bool) -> None:
        stuck = self.model.held_from(num_blocks)
        in_the_way = stuck - self.model.draining()
        if in_the_way and not drain and num_blocks < self.model.num_blocks:
            with pytest.raises(RequestError, match=r"blocks past that are held|are held"):
                self.manager.resize(num_blocks)
        else:
            assert self.manager.resize(num_blocks, drain=drain) == stuck
            self.model.resize(num_blocks)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.model.now += seconds

    @rule()
    def new_weights(self) -> None:
        self.manager.set_weights_version("w")
        self.model.forget()
        self.model.weights_version = "w"

    @rule()
    def reset(self) -> None:
        if self.model.requests:
            with pytest.raises(RequestError, match="requests are open"):
                self.manager.reset()
        else:
            self.manager.reset()
            self.model.forget()

    @rule()
    def read_events(self) -> None:
        """Whoever follows the events knows what can be found; a reader that starts now learns the same."""
        self.follower.apply(self.manager.take_events())
        late = EventFollower()
        late.apply(self.manager.take_events(everything=True))
        assert self.follower.media == late.media
        assert len(late.media) == sum(block.findable for block in self.model.blocks)

    def model_tick(self) -> None:
        """The manager looks at the clock in calls that evict or let go, once there was a priority."""
        self.model.tick()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        stats, model = self.manager.stats(), self.model
        assert stats.evicted_blocks == model.evicted
        assert (stats.free, stats.evictable) == (len(model.free()), len(model.evictable()))
        assert stats.free + stats.evictable + stats.held == stats.num_blocks == model.num_blocks + model.draining()
        for request_id, request in model.requests.items():
            assert self.manager.block_table(request_id).tolist() == request.table
            assert self.manager.num_tokens(request_id) == len(request.tokens)
            assert self.manager.num_computed_tokens(request_id) == request.computed


class TwoQueueMachine(ManagerMachine):
    policy = "2q"


class CollidingMachine(ManagerMachine):
    hash_mask = 0


SETTINGS = settings(
    max_examples=70, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
for machine in (ManagerMachine, TwoQueueMachine, CollidingMachine):
    machine.TestCase.settings = SETTINGS
TestLru = ManagerMachine.TestCase
TestTwoQueue = TwoQueueMachine.TestCase
TestCollidingHash = CollidingMachine.TestCase
