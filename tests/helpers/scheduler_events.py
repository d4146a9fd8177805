"""What a router does with KV events: a dict from block hash to the media that hold the block."""

from __future__ import annotations

from collections.abc import Iterable

from fastkv.core.digest import ROOT_DIGEST, block_digest
from fastkv.scheduler.events import AllBlocksCleared, BlockHash, BlockStored, KVCacheEvent


class EventFollower:
    """Applies events, and checks that each makes sense: parents first, hashes that the tokens give, nothing twice."""

    def __init__(self) -> None:
        self.media: dict[BlockHash, set[str | None]] = {}

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.media.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                for digest in event.block_hashes:
                    self.media[digest].remove(event.medium)
                    if not self.media[digest]:
                        del self.media[digest]

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert parent is None or parent in self.media, "a block was stored before its parent"
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for place, digest in enumerate(event.block_hashes):
            keys = event.extra_keys[place] if event.extra_keys else None
            tokens = event.token_ids[place * size : (place + 1) * size]
            before = parent if isinstance(parent, bytes) else ROOT_DIGEST
            assert digest == block_digest(before, tokens, keys[0] if keys else b"")
            media = self.media.setdefault(digest, set())
            assert event.medium not in media, "a block was stored twice in one medium"
            media.add(event.medium)
            parent = digest
