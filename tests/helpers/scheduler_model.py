"""An obviously correct model of the CacheManager's device level: sets, dicts and brute force.

A published block is named by everything it depends on: the tuple of (identity fields, tokens) of all blocks up to and
including it. Every question is answered by looking at all blocks. The model does not choose block ids; it checks the
ones it is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fastkv.core.digest import NO_IDENTITY, Identity

Name = tuple[object, ...]


@dataclass
class ModelRequest:
    tokens: list[int]
    identity: Identity = NO_IDENTITY
    table: list[int] = field(default_factory=list)
    num_published: int = 0
    computed: int = 0


@dataclass
class SchedulerModel:
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        self.free: set[int] = set(range(self.num_blocks))
        self.cached: dict[Name, int] = {}
        self.last_use: dict[Name, tuple[int, int]] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.clock = 0
        self.evicted = 0

    def names(self, request: ModelRequest) -> list[Name]:
        """Name of every full block of the request's tokens."""
        size, identity = self.block_size, request.identity
        parts: list[object] = []
        for block in range(len(request.tokens) // size):
            own = [(i.digest, i.start, i.end) for i in identity.images if i.start // size == block]
            root = (identity.salt, identity.lora, identity.lora_id, identity.weights_version) if block == 0 else ()
            parts.append((root, tuple(own), tuple(request.tokens[block * size : (block + 1) * size])))
        return [tuple(parts[: n + 1]) for n in range(len(parts))]

    def held(self) -> set[Name]:
        return {name for r in self.requests.values() for name in self.names(r)[: r.num_published]}

    def evictable(self) -> set[Name]:
        return set(self.cached) - self.held()

    def available(self) -> int:
        return len(self.free) + len(self.evictable())

    def open(self, request_id: str, tokens: list[int], identity: Identity) -> None:
        self.requests[request_id] = ModelRequest(list(tokens), identity)

    def match(self, request_id: str) -> int:
        """Returns the number of blocks found."""
        request = self.requests[request_id]
        self._unhold(request)
        request.table, request.computed, found = [], 0, 0
        if self.enable_prefix_caching:
            names = self.names(request)
            while found < len(names) and names[found] in self.cached:
                found += 1
            while found * self.block_size >= len(request.tokens) or self._cuts_an_image(request, found):
                found -= 1
            request.table = [self.cached[name] for name in names[:found]]
        request.num_published, request.computed = found, found * self.block_size
        return found

    def _cuts_an_image(self, request: ModelRequest, found: int) -> bool:
        edge = found * self.block_size
        return any(image.start < edge < image.end for image in request.identity.images)

    def victims(self, count: int) -> list[Name]:
        """What the next count evictions take, in order: of the unheld leaves, always the least recently used."""
        cached, held, order = dict(self.cached), self.held(), []
        for _ in range(count):
            parents = {name[:-1] for name in cached}
            leaves = [name for name in cached if name not in held and name not in parents]
            order.append(min(leaves, key=lambda name: self.last_use[name]))
            del cached[order[-1]]
        return order

    def allocate(self, request_id: str, count: int, ids: list[int]) -> None:
        """Check ids that the manager handed out, and follow."""
        assert len(ids) == len(set(ids)) == count
        victims = self.victims(max(0, count - len(self.free)))
        freed = {self.cached.pop(name) for name in victims}
        self.evicted += len(victims)
        assert set(ids) <= self.free | freed, f"{ids} are not free {self.free} and not the right victims {freed}"
        self.free = (self.free | freed) - set(ids)
        self.requests[request_id].table += ids

    def publish(self, request_id: str, computed: int) -> int:
        request = self.requests[request_id]
        request.computed = computed
        if self.enable_prefix_caching:
            for block in range(request.num_published, computed // self.block_size):
                name = self.names(request)[block]
                if name in self.cached:
                    self.free.add(request.table[block])
                    request.table[block] = self.cached[name]
                else:
                    self.cached[name] = request.table[block]
                request.num_published = block + 1
        return request.num_published

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.free |= set(request.table[request.num_published :])
        self._unhold(request)
        request.table, request.computed = [], 0

    def release(self, request_id: str) -> None:
        self.preempt(request_id)
        del self.requests[request_id]

    def _unhold(self, request: ModelRequest) -> None:
        names = self.names(request)[: request.num_published]
        request.num_published = 0
        self.clock += 1
        held = self.held()
        for depth, name in enumerate(names):
            if name not in held:
                self.last_use[name] = (self.clock, -depth)
