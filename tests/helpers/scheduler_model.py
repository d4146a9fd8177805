"""An obviously correct model of the CacheManager's device level: sets, lists and brute force.

Every question is answered by looking at everything: a block is held if any request or pin has it, evictable if it is
published and not held, the victim is the best of all unheld leaves. The model does not choose block ids; it checks the
ones it is told. Time is a counter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastkv.core.digest import NO_IDENTITY, Identity

Content = tuple[object, ...]


@dataclass(eq=False)
class ModelBlock:
    """A published block, named by its parent and its content."""

    parent: ModelBlock | None
    content: Content
    block: int
    findable: bool = True
    last_use: tuple[int, int] = (0, 0)  # event at which it became unheld, then deeper first
    hot: bool = False
    probation: bool = False
    priority: int = 0
    expiry: float = 0.0
    raised: int = 0  # number of the raise that came last

    def path(self) -> list[ModelBlock]:
        return [*(self.parent.path() if self.parent else []), self]

    def name(self) -> Content:
        return tuple(block.content for block in self.path())


@dataclass
class ModelRequest:
    tokens: list[int]
    identity: Identity = NO_IDENTITY
    priority: int = 0
    ttl: float = float("inf")
    path: list[ModelBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    computed: int = 0
    stale: bool = False

    @property
    def table(self) -> list[int]:
        return [block.block for block in self.path] + self.own


@dataclass
class SchedulerModel:
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    policy: str = "lru"
    max_pinned: int = 0
    weights_version: str = ""

    def __post_init__(self) -> None:
        self.blocks: list[ModelBlock] = []
        self.requests: dict[str, ModelRequest] = {}
        self.pins: dict[int, list[ModelBlock]] = {}
        self.event = self.evicted = self.raises = 0
        self.now = 0.0
        self.ghosts: list[Content] = []
        self.ghost_capacity = self.num_blocks

    # -- questions --------------------------------------------------------------------------------------------------

    def held(self) -> set[ModelBlock]:
        holds = [request.path for request in self.requests.values()] + list(self.pins.values())
        return {block for path in holds for block in path}

    def evictable(self) -> list[ModelBlock]:
        held = self.held()
        return [block for block in self.blocks if block not in held]

    def used(self) -> set[int]:
        own = [block for request in self.requests.values() for block in request.own]
        ids = own + [block.block for block in self.blocks]
        assert len(set(ids)) == len(ids), "the manager handed out a block twice"
        return set(ids)

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - self.used()

    def draining(self) -> int:
        return sum(block >= self.num_blocks for block in self.used())

    def available(self) -> int:
        return len(self.free()) + len(self.evictable())

    def pinned(self) -> set[ModelBlock]:
        return {block for path in self.pins.values() for block in path}

    def contents(self, request: ModelRequest) -> list[Content]:
        """Content of every full block of the request's tokens."""
        size, identity = self.block_size, request.identity
        root = (identity.salt, identity.lora, identity.lora_id, identity.weights_version)
        return [
            (
                root if block == 0 else (),
                tuple((i.digest, i.start, i.end) for i in identity.images if i.start // size == block),
                tuple(request.tokens[block * size : (block + 1) * size]),
            )
            for block in range(len(request.tokens) // size)
        ]

    def find(self, parent: ModelBlock | None, content: Content) -> ModelBlock | None:
        for block in self.blocks:
            if block.findable and block.parent is parent and block.content == content:
                return block
        return None

    def victim(self, evictable: list[ModelBlock]) -> ModelBlock:
        """Of the evictable blocks, the one that the policy evicts; always one without children."""

        def oldest(blocks: list[ModelBlock]) -> ModelBlock:
            return min(blocks, key=lambda block: block.last_use)

        parents = {block.parent for block in self.blocks}
        lowest = min(block.priority for block in evictable)
        choice = [block for block in evictable if block.priority == lowest]
        if self.policy == "2q" and lowest == 0:
            probation = [block for block in choice if block.probation]
            main = [block for block in choice if not block.probation]
            if probation and (len(probation) > self.num_blocks // 2 or not main or oldest(main) in parents):
                choice = probation
            else:
                choice = main
        chosen = oldest(choice)
        assert chosen not in parents, "a parent would go before its child"
        return chosen

    # -- a request's life ---------------------------------------------------------------------------------------------

    def open(self, request_id: str, tokens: list[int], identity: Identity, priority: int = 0, ttl: float = 1e9) -> None:
        identity = replace(identity, weights_version=self.weights_version)
        self.requests[request_id] = ModelRequest(list(tokens), identity, priority, ttl)

    def match(self, request_id: str) -> int:
        """Returns the number of blocks found."""
        request = self.requests[request_id]
        self.drop(request)
        path: list[ModelBlock] = []
        if self.enable_prefix_caching:
            for content in self.contents(request):
                block = self.find(path[-1] if path else None, content)
                if block is None:
                    break
                path.append(block)
            while len(path) * self.block_size >= len(request.tokens) or self._cuts_an_image(request, len(path)):
                path.pop()
        for block in path:
            block.hot = True
        request.path, request.computed = path, len(path) * self.block_size
        return len(path)

    def _cuts_an_image(self, request: ModelRequest, found: int) -> bool:
        edge = found * self.block_size
        return any(image.start < edge < image.end for image in request.identity.images)

    def allocate(self, request_id: str, count: int, ids: list[int]) -> None:
        """Check ids that the manager handed out, and follow."""
        assert len(ids) == count
        while len(self.free()) < count:
            self.evict_one()
        assert set(ids) <= self.free(), f"{ids} are not among the free blocks {self.free()}"
        self.requests[request_id].own += ids

    def evict_one(self) -> None:
        victim = self.victim(self.evictable())
        if victim.probation and victim.priority == 0:
            self.ghosts = [*self.ghosts, victim.name()][-self.ghost_capacity :]
        self.blocks.remove(victim)
        self.evicted += 1

    def publish(self, request_id: str, computed: int) -> int:
        request = self.requests[request_id]
        request.computed = computed
        if self.enable_prefix_caching and not request.stale:
            self._share(request, findable=True)
        return len(request.path)

    def _share(self, request: ModelRequest, findable: bool) -> None:
        for content in self.contents(request)[len(request.path) : request.computed // self.block_size]:
            parent = request.path[-1] if request.path else None
            own = request.own.pop(0)
            block = self.find(parent, content) if findable else None
            if block is None:
                block = ModelBlock(parent, content, own, findable)
                if self.policy == "2q" and block.name() in self.ghosts:
                    self.ghosts.remove(block.name())
                    block.hot = parent is None or parent.hot
                self.blocks.append(block)
            request.path.append(block)

    def preempt(self, request_id: str) -> None:
        self.drop(self.requests[request_id])

    def release(self, request_id: str) -> None:
        self.preempt(request_id)
        del self.requests[request_id]

    def drop(self, request: ModelRequest) -> None:
        path, request.path, request.own, request.computed, request.stale = request.path, [], [], 0, False
        if request.priority:
            self._raise_priority(path, request.priority, self.now + request.ttl)
        self.let_go(path)

    def let_go(self, path: list[ModelBlock]) -> None:
        """A hold on path ended just now."""
        self.event += 1
        held = self.held()
        for depth, block in enumerate(path):
            if block not in held:
                block.last_use, block.probation = (self.event, -depth), self.policy == "2q" and not block.hot
        self.sweep()

    def sweep(self) -> None:
        """Blocks that nobody holds and that are unfindable or past the end leave, with all below them."""
        held = self.held()
        gone = [b for b in self.blocks if b not in held and not b.findable]
        past = [b for b in self.blocks if b not in held and b.findable and b.block >= self.num_blocks]
        past = [b for b in self.blocks if b not in gone and any(p in past for p in b.path())]
        self.evicted += len(past)
        self.blocks = [b for b in self.blocks if b not in gone and b not in past]

    # -- priorities --------------------------------------------------------------------------------------------------

    def _raise_priority(self, path: list[ModelBlock], priority: int, expiry: float) -> None:
        self.raises += 1
        for block in path:
            block.expiry = max(block.expiry, expiry) if block.priority else expiry
            block.priority = max(block.priority, priority)
            block.raised = self.raises

    def tick(self) -> None:
        """Blocks whose priority expired count as used now; deeper ones first, then those raised longer ago."""
        due = [block for block in self.blocks if block.priority and block.expiry <= self.now]
        for block in sorted(due, key=lambda block: (-len(block.path()), block.raised)):
            self.event += 1
            block.priority = 0
            block.last_use, block.probation = (self.event, 0), self.policy == "2q" and not block.hot

    # -- speculation, forks, pins, the whole ------------------------------------------------------------------------

    def trim(self, request_id: str) -> int:
        request = self.requests[request_id]
        keep = max(0, -(-len(request.tokens) // self.block_size) - len(request.path))
        given_back = len(request.own[keep:])
        del request.own[keep:]
        return given_back

    def fork(self, parent_id: str, child_id: str, copies: list[tuple[int, int]]) -> None:
        parent = self.requests[parent_id]
        self._share(parent, findable=False)
        child = ModelRequest(
            list(parent.tokens), parent.identity, parent.priority, parent.ttl, list(parent.path), [], parent.computed
        )
        child.stale = parent.stale
        self.requests[child_id] = child
        assert len(copies) == (parent.computed % self.block_size != 0)
        for source, target in copies:
            assert source == parent.own[0]
            self.allocate(child_id, 1, [target])

    def pin(self, request_id: str, pin: int, num_blocks: int) -> None:
        self.pins[pin] = self.requests[request_id].path[:num_blocks]

    def unpin(self, pin: int) -> None:
        self.let_go(self.pins.pop(pin))

    def resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.sweep()

    def held_from(self, num_blocks: int) -> int:
        evictable = {block.block for block in self.evictable()}
        return sum(block >= num_blocks for block in self.used() - evictable)

    def forget(self) -> None:
        for block in self.blocks:
            block.findable = False
        self.pins.clear()
        for request in self.requests.values():
            request.stale = request.stale or bool(request.path or request.own)
        self.sweep()
