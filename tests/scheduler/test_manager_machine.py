"""The CacheManager against an obviously correct model, any order of calls, check_integrity after each."""

from __future__ import annotations

import pytest
from helpers.scheduler_model import SchedulerModel
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastkv.core.digest import Identity, ImageSpan
from fastkv.errors import OutOfBlocksError, RequestError
from fastkv.scheduler import CacheManager

REQUEST_IDS = st.sampled_from(["a", "b", "c", "d"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
IMAGES = st.sampled_from([(), (), (), (b"x", 0, 1), (b"x", 1, 5), (b"y", 1, 5), (b"x", 2, 4), (b"x", 4, 8)])


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.sampled_from([True] * 4 + [False]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.manager = CacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.model = SchedulerModel(num_blocks, block_size, caching)

    @rule(request_id=REQUEST_IDS, tokens=TOKENS, salt=st.sampled_from(["", "", "s"]), image=IMAGES)
    def open(self, request_id: str, tokens: list[int], salt: str, image: tuple) -> None:
        images = (ImageSpan(*image),) if image and image[2] <= len(tokens) else ()
        identity = Identity(salt=salt, images=images)
        if request_id in self.model.requests:
            with pytest.raises(RequestError, match="is open already"):
                self.manager.open(request_id, tokens, identity)
        else:
            self.manager.open(request_id, tokens, identity)
            self.model.open(request_id, tokens, identity)

    @rule(request_id=REQUEST_IDS)
    def match(self, request_id: str) -> None:
        request = self.model.requests.get(request_id)
        if (
            request is None
            or len(request.table) > request.num_published
            or (request.computed > request.num_published * self.model.block_size)
        ):
            with pytest.raises(RequestError):
                self.manager.match(request_id)
            return
        found = self.manager.match(request_id)
        assert len(found.device_blocks) == self.model.match(request_id)
        assert found.device_blocks.tolist() == request.table
        assert found.num_tokens == found.num_device_tokens == request.computed < len(request.tokens)

    @rule(request_id=REQUEST_IDS, count=st.integers(-1, 9))
    def allocate(self, request_id: str, count: int) -> None:
        if request_id not in self.model.requests or count < 0:
            with pytest.raises(RequestError):
                self.manager.allocate(request_id, count)
        elif count > self.model.available():
            assert self.manager.try_allocate(request_id, count) is None
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(request_id, count)
        else:
            self.model.allocate(request_id, count, self.manager.allocate(request_id, count).tolist())

    @rule(request_id=REQUEST_IDS, tokens=st.lists(st.integers(0, 1), max_size=3))
    def append(self, request_id: str, tokens: list[int]) -> None:
        if request_id in self.model.requests:
            self.manager.append(request_id, tokens)
            self.model.requests[request_id].tokens += tokens

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.requests)))
        request = self.model.requests[request_id]
        limit = min(len(request.tokens), len(request.table) * self.model.block_size)
        computed = data.draw(st.integers(max(0, request.computed - 1), limit + 1))
        if not request.computed <= computed <= limit:
            with pytest.raises(RequestError):
                self.manager.publish(request_id, computed)
        else:
            assert self.manager.publish(request_id, computed) == self.model.publish(request_id, computed)

    @rule(request_id=REQUEST_IDS, how=st.sampled_from(["release", "preempt"]))
    def let_go(self, request_id: str, how: str) -> None:
        if request_id not in self.model.requests:
            with pytest.raises(RequestError, match="is not open"):
                getattr(self.manager, how)(request_id)
        else:
            getattr(self.manager, how)(request_id)
            getattr(self.model, how)(request_id)

    @precondition(lambda self: not self.model.requests)
    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.model.free |= set(self.model.cached.values())
        self.model.cached.clear()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        stats, model = self.manager.stats(), self.model
        assert (stats.free, stats.evictable, stats.evicted_blocks) == (
            len(model.free),
            len(model.evictable()),
            model.evicted,
        )
        assert stats.free + stats.evictable + stats.held == stats.num_blocks == model.num_blocks
        for request_id, request in model.requests.items():
            assert self.manager.block_table(request_id).tolist() == request.table
            assert self.manager.num_tokens(request_id) == len(request.tokens)
            assert self.manager.num_computed_tokens(request_id) == request.computed


ManagerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestManagerMachine = ManagerMachine.TestCase
