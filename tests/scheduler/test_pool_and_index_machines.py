"""BlockPool and PrefixIndex by themselves, against sets and dicts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastkv.core.digest import NO_IDENTITY, Identity
from fastkv.errors import OutOfBlocksError, RequestError
from fastkv.scheduler.block_pool import DeviceBlockPool, HostBlockPool
from fastkv.scheduler.prefix_index import HeldPrefix, PrefixIndex

SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 10))
    def start(self, num_blocks: int) -> None:
        self.pool, self.num_blocks, self.used = HostBlockPool(num_blocks), num_blocks, set[int]()

    @rule(count=st.integers(-1, 6))
    def allocate(self, count: int) -> None:
        free = set(range(self.num_blocks)) - self.used
        if count < 0:
            with pytest.raises(RequestError, match="ask for 0 or more"):
                self.pool.allocate(count)
        elif count > len(free):
            with pytest.raises(OutOfBlocksError, match="host blocks"):
                self.pool.allocate(count)
        else:
            ids = self.pool.allocate(count).tolist()
            assert len(set(ids)) == count
            assert set(ids) <= free
            self.used |= set(ids)

    @rule(ids=st.lists(st.integers(-1, 12), max_size=4))
    def free(self, ids: list[int]) -> None:
        if set(ids) <= self.used and len(set(ids)) == len(ids):
            self.pool.free(ids)
            self.used -= set(ids)
        else:
            with pytest.raises(RequestError, match="cannot free host block"):
                self.pool.free(ids)

    @rule(num_blocks=st.integers(0, 12))
    def resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        assert self.pool.resize(num_blocks) == sum(block >= num_blocks for block in self.used)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            assert self.pool.num_blocks == self.num_blocks
            assert self.pool.num_free == len(set(range(self.num_blocks)) - self.used)
            assert self.pool.num_draining == sum(block >= self.num_blocks for block in self.used)
            assert all(self.pool.is_free(b) == (b < self.num_blocks and b not in self.used) for b in range(14))


class IndexMachine(RuleBasedStateMachine):
    """The model: a dict from (identity, prefix of tokens) to block, holds as lists of keys, unheld keys in order."""

    hash_mask = 2**64 - 1

    @initialize(block_size=st.sampled_from([1, 2, 3]))
    def start(self, block_size: int) -> None:
        self.size = block_size
        self.pool = DeviceBlockPool(16)
        self.index = PrefixIndex(block_size, self.pool, hash_mask=self.hash_mask)
        self.blocks: dict[tuple, int] = {}
        self.holds: list[tuple[HeldPrefix, list[tuple]]] = []
        self.order: list[tuple] = []

    def keys(self, tokens: list[int], identity: Identity, count: int) -> list[tuple]:
        return [(identity.salt, tuple(tokens[: (n + 1) * self.size])) for n in range(count)]

    def held(self) -> set[tuple]:
        return {key for _, keys in self.holds for key in keys}

    def take_hold(self, prefix: HeldPrefix, keys: list[tuple]) -> None:
        self.holds.append((prefix, keys))
        self.order = [key for key in self.order if key not in keys]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), salt=st.sampled_from(["", "s"]))
    def match(self, tokens: list[int], salt: str) -> None:
        identity = Identity(salt=salt) if salt else NO_IDENTITY
        prefix = self.index.match(tokens, identity)
        keys = self.keys(tokens, identity, len(tokens) // self.size)
        found = next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))
        assert prefix.device_blocks == tuple(self.blocks[key] for key in keys[:found])
        self.take_hold(prefix, keys[:found])

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), salt=st.sampled_from(["", "s"]))
    def publish(self, tokens: list[int], salt: str) -> None:
        identity = Identity(salt=salt) if salt else NO_IDENTITY
        keys = self.keys(tokens, identity, len(tokens) // self.size)
        if len(keys) > self.pool.num_free:
            return
        own = self.pool.allocate(len(keys)).tolist()
        prefix = self.index.publish(tokens, own, identity)
        for key, block in zip(keys, own, strict=True):
            self.blocks.setdefault(key, block)
        assert prefix.device_blocks == tuple(self.blocks[key] for key in keys)
        self.take_hold(prefix, keys)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holds:
            prefix, keys = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
            self.index.release(prefix)
            self.order += [key for key in reversed(keys) if key not in self.held()]

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        if count > len(self.order):
            with pytest.raises(OutOfBlocksError):
                self.index.evict(count)
            return
        self.index.evict(count)
        for key in self.order[:count]:
            assert not any(
                key[0] == other[0] and other[1][: len(key[1])] == key[1] and other != key for other in self.blocks
            )
            assert self.pool.is_free(self.blocks.pop(key))
        del self.order[:count]

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "index"):
            self.index.check_integrity()
            self.pool.check_integrity()
            assert len(self.index) == len(self.blocks) == 16 - self.pool.num_free
            assert self.index.num_evictable == len(self.order)


class CollidingIndexMachine(IndexMachine):
    hash_mask = 0


for machine in (PoolMachine, IndexMachine, CollidingIndexMachine):
    machine.TestCase.settings = SETTINGS
TestPool = PoolMachine.TestCase
TestIndex = IndexMachine.TestCase
TestCollidingIndex = CollidingIndexMachine.TestCase


@pytest.mark.parametrize("num_blocks", [-1, 2**31, True, 1.5, None])
def test_pool_of_no_size_is_refused(num_blocks):
    with pytest.raises(RequestError, match="num_blocks"):
        DeviceBlockPool(num_blocks)


def test_index_publish_of_more_blocks_than_tokens_is_refused():
    pool = DeviceBlockPool(4)
    index = PrefixIndex(4, pool)
    with pytest.raises(RequestError, match="more blocks than full blocks"):
        index.publish([1, 2, 3, 4, 5], pool.allocate(2).tolist())
    assert len(index) == 0
