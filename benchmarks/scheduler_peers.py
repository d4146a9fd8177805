"""Other engines' cache bookkeeping, measured on the work of the `hit`, `life` and `admit` rows, where it is installed.

Called by benchmarks/scheduler.py. Each peer gets its tokens in the form it likes best, prepared outside the
measurement, and only what it does between two steps is timed:

    sglang       RadixCache as an engine calls it, on its Rust tree core. hit = match, lock, collect the slots of the
                 prefix, unlock. Eviction goes to the core directly, so its slot allocator does not count.
    sglang-rust  the same work at the binding of the Rust tree core, without SGLang's Python.
    vllm         KVCacheManager with its default hash (sha256). hit = block hashes of a new request, lookup, take, free;
                 admit and life contain the hashes too, as ours contain theirs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from common import Row, interleave
from scheduler_cases import BLOCKS_A_SAMPLE, Sizes, expect

MAX_POOL = 10**5  # a peer written in Python takes minutes to fill a larger one
WHAT = ("hit", "life", "admit")


class PeerBench(Protocol):
    """One peer whose pool is full of `sizes.num_prompts` released prompts. Each method is one sample, in ns a block."""

    def hit(self) -> list[float]:
        """Take and give back full hits, over the whole pool in turn."""

    def life(self) -> list[float]:
        """Half-cached prompts: take what is cached, admit the rest, give everything back."""

    def admit(self) -> list[float]:
        """Prompts never seen: evict and insert."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that can be measured here."""

    name: str
    make: Callable[[Sizes], PeerBench]


def installed() -> tuple[list[Peer], list[str]]:
    """The peers that are here, and a note for each one that is not."""
    peers, notes = [], []
    for name, find in (("sglang", _find_sglang), ("sglang-rust", _find_sglang_rust), ("vllm", _find_vllm)):
        found = find()
        if isinstance(found, str):
            notes.append(f"peer {name} is not measured: {found}")
        else:
            peers.append(Peer(name, found))
    return peers, notes


def measure(peer: Peer, sizes: Sizes, budget_s: float, bounds: Mapping[str, float]) -> list[Row]:
    """The peer's rows for these sizes; none for a pool past MAX_POOL.

    Args:
        peer: who.
        sizes: of prompt, block and pool.
        budget_s: seconds a row.
        bounds: the floor's figures by row name, measured in the same run.
    """
    if sizes.pool > MAX_POOL:
        return []
    bench, rows = peer.make(sizes), []
    for what in WHAT:  # life wants the prompts that admit pushes out
        (median,) = interleave([getattr(bench, what)], budget_s, warmup_rounds=4)
        label = f"{what}_{sizes.label}"
        rows.append(Row.cost(f"peer_{peer.name}_{label}", median[0], "ns/block", bounds[label]))
    return rows


class _Rounds:
    """What both peers share: prompts, visited in turn, and prompts that were never seen."""

    def __init__(self, sizes: Sizes, num_prompts: int) -> None:
        self.sizes = sizes
        rng = np.random.default_rng(1)
        self.prompts = rng.integers(0, 2**17, (num_prompts, sizes.prompt + 1), dtype=np.int64)
        self.fresh = rng.integers(0, 2**17, (sizes.group, sizes.prompt + 1), dtype=np.int64)
        self.serial = 0
        self.turns = self._turns()

    def _turns(self) -> Iterator[range]:
        group = self.sizes.group
        while True:
            for start in range(0, len(self.prompts) - group + 1, group):
                yield range(start, start + group)

    def renew(self, start: int) -> None:
        """Make the fresh prompts new from this token on."""
        for row in self.fresh:
            self.serial += 1
            row[start] = 2**17 + self.serial

    def half_fresh(self) -> int:
        """Fresh prompts whose first half is that of the prompts whose turn it is; returns the half's tokens."""
        window, half = next(self.turns), self.sizes.blocks // 2 * self.sizes.block
        self.fresh[:, :half] = self.prompts[window.start : window.stop, :half]
        self.renew(half)
        return half


def _find_sglang_rust() -> Callable[[Sizes], PeerBench] | str:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return "sglang is not installed"
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt" / "mem_cache" / "rust_tree_core"
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    library = next((path for suffix in suffixes for path in folder.glob(f"mem_cache{suffix}")), None)
    if library is None:
        return f"this sglang has no Rust tree core for this Python in {folder}"
    try:
        import torch  # its libraries have to be loaded before the extension's
    except ImportError as error:
        return f"its tree core needs torch ({error})"
    torch.set_num_threads(1)  # as everybody here; its thread pool would spin beside the others
    name = "sglang.srt.mem_cache.rust_tree_core.mem_cache"
    core = sys.modules.get(name)
    if core is None:
        core_spec = importlib.util.spec_from_file_location("mem_cache", library)
        assert core_spec is not None
        assert core_spec.loader is not None
        core = importlib.util.module_from_spec(core_spec)
        core_spec.loader.exec_module(core)

    def make(sizes: Sizes) -> PeerBench:
        init = core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=sizes.block, device="cpu")
        return _SglangBench(sizes, core, core.RustUnifiedTreeCoreBinding(init, [0]), torch)

    return make


def _find_sglang() -> Callable[[Sizes], PeerBench] | str:
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed"
    try:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache, radix_cache
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.rust_tree_core.extension import bindings
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    except ImportError as error:
        return f"its RadixCache cannot be imported ({error})"
    torch.set_num_threads(1)

    def make(sizes: Sizes) -> PeerBench:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None),
            page_size=sizes.block,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
        face = _SglangFace(UnifiedRadixCache(params), base_prefix_cache, radix_cache.RadixKey)
        return _SglangBench(sizes, bindings, face.cache.tree_core._binding, torch, face)

    return make


@dataclass(frozen=True, slots=True)
class _SglangFace:
    """The calls that SGLang's own scheduler makes."""

    cache: Any
    words: Any
    key_class: Any

    def match(self, key: array[int]) -> Any:
        return self.cache.match_prefix(self.words.MatchPrefixParams(key=self.key_class(key, None)))

    def lock(self, match: Any) -> Any:
        node = match.last_device_node
        lock = self.cache.inc_lock_ref(node)
        self.cache.path_device_indices(node)
        return node, lock

    def unlock(self, held: Any) -> None:
        node, lock = held
        self.cache.dec_lock_ref(node, lock.to_dec_params())

    def insert(self, key: array[int], slots: Any, cached: int) -> None:
        key_object = self.key_class(key, None)
        self.cache.insert(self.words.InsertParams(key=key_object, value=slots, prev_prefix_len=cached))


class _SglangBench:
    """The tree has no size of its own: the bench keeps it at the pool's tokens, as SGLang's allocator would."""

    def __init__(self, sizes: Sizes, core: Any, tree: Any, torch: Any, face: _SglangFace | None = None) -> None:
        self.rounds, self.sizes, self.core, self.tree = _Rounds(sizes, sizes.num_prompts), sizes, core, tree
        if face is not None:
            self._match, self._lock, self._unlock = face.match, face.lock, face.unlock  # type: ignore[method-assign]
            self._insert = lambda key, cached=0: face.insert(key, self.slots, cached)  # type: ignore[method-assign]
        self.root = self.tree.root_node_handle()
        self.slots = torch.arange(sizes.prompt, dtype=torch.int64)
        self.pool_tokens = sizes.pool * sizes.block
        self.keys = [array("q", row.tobytes()) for row in self.rounds.prompts]
        for key in self.keys:
            self._insert(key[: sizes.prompt])
        self.used_tokens = len(self.keys) * sizes.prompt  # counted here: the tree's own total_size() walks all nodes
        half = sizes.blocks // 2 * sizes.block
        for key in self.keys:  # used last, so that `life` finds the first halves
            self._unlock(self._lock(self._match(key[: half + 1])))

    def _match(self, key: array[int]) -> Any:
        return self.tree.match_prefix(self.core.MatchParamsBinding(key=key))

    def _lock(self, match: Any) -> Any:
        """Hold the prefix and get its slots, which a request's block table is written from."""
        lock = self.tree.inc_lock_ref(match.last_device_node_id, [])
        self.tree.collect_full_device_indices(match.last_device_node_id, self.root)
        return lock

    def _unlock(self, lock: Any) -> None:
        receipt = self.core.DecLockRefParamsBinding(
            node_id=lock.node_id,
            skipped_lock_components=lock.skipped_lock_components,
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        )
        self.tree.dec_lock_ref(lock.node_id, receipt, False)

    def _insert(self, key: array[int], cached: int = 0) -> None:
        self.tree.insert(self.core.InsertParamsBinding(key=key, value=self.slots, prev_prefix_len=cached))

    def _make_room(self, tokens: int) -> None:
        self.used_tokens += tokens
        wanted = self.used_tokens - self.pool_tokens
        if wanted <= 0:
            return
        freed, tree = {0: 0}, self.tree
        tree.evict_device_start(0, wanted)
        while freed[0] < wanted:
            step = tree.evict_device_next_node(0, freed)
            if step.node_id is None:
                raise RuntimeError(f"sglang's tree gave {freed[0]} of {wanted} tokens back")
            freed[0] += tree.evict_device_leaf(step.node_id).tracker.get(0, 0)
        tree.evict_device_end(0)
        self.used_tokens -= freed[0]

    def hit(self) -> list[float]:
        keys = [self.keys[place] for place in next(self.rounds.turns)]
        found = 0
        began = perf_counter_ns()
        locks = []
        for key in keys:
            match = self._match(key)
            found += match.device_prefix_len
            locks.append(self._lock(match))
        for lock in locks:
            self._unlock(lock)
        ns = perf_counter_ns() - began
        expect(found, self.sizes.prompt * len(keys))
        return [self.sizes.scale(ns)]

    def life(self) -> list[float]:
        half, found, prompt = self.rounds.half_fresh(), 0, self.sizes.prompt
        whole = [array("q", row.tobytes()) for row in self.rounds.fresh]
        bare = [key[:prompt] for key in whole]
        began = perf_counter_ns()
        for key, full in zip(whole, bare, strict=True):
            match = self._match(key)
            found += match.device_prefix_len
            lock = self._lock(match)
            self._make_room(prompt - half)
            self._insert(full, half)
            self._unlock(lock)
        ns = perf_counter_ns() - began
        expect(found, half * len(whole))
        return [self.sizes.scale(ns)]

    def admit(self) -> list[float]:
        self.rounds.renew(0)
        keys = [array("q", row[: self.sizes.prompt].tobytes()) for row in self.rounds.fresh]
        began = perf_counter_ns()
        for key in keys:
            self._make_room(self.sizes.prompt)
            self._insert(key)
        return [self.sizes.scale(perf_counter_ns() - began)]


def _find_vllm() -> Callable[[Sizes], PeerBench] | str:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request
    except ImportError as error:
        return f"vllm's KVCacheManager cannot be imported ({error})"

    def make(sizes: Sizes) -> PeerBench:
        sha256 = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=sizes.block, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(sizes.pool + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one block is its null block
        manager = KVCacheManager(config, 2 * sizes.prompt, sizes.block, sizes.block)
        hasher = kv_cache_utils.get_request_block_hasher(sizes.block, sha256)
        params = SamplingParams(max_tokens=1)

        def request(name: str, tokens: list[int]) -> Any:
            return Request(name, tokens, params, None, block_hasher=hasher)

        return _VllmBench(sizes, manager, request)

    return make


class _VllmBench:
    """A hit costs a new block for the token that is left to compute; the pool has room for those beside the prompts."""

    def __init__(self, sizes: Sizes, manager: Any, request: Callable[[str, list[int]], Any]) -> None:
        num_prompts = (sizes.pool - 2 * BLOCKS_A_SAMPLE) // (sizes.blocks + 1)
        self.rounds, self.sizes, self.manager, self.request = _Rounds(sizes, num_prompts), sizes, manager, request
        for row in self.rounds.prompts:
            self._admit([row.tolist()])
        half = sizes.blocks // 2 * sizes.block
        for row in self.rounds.prompts:  # used last, so that `life` finds the first halves
            self._hit([row[: half + 1].tolist()], half)

    def _hit(self, prompts: Sequence[list[int]], cached: int) -> int:
        manager, found, held = self.manager, 0, []
        began = perf_counter_ns()
        for place, tokens in enumerate(prompts):
            request = self.request(f"hit-{place}", tokens)
            blocks, num_cached, *_ = manager.get_computed_blocks(request)
            found += num_cached
            manager.allocate_slots(request, 1, num_cached, blocks)
            held.append(request)
        for request in held:
            manager.free(request)
        ns = perf_counter_ns() - began
        expect(found, cached * len(prompts))
        return ns

    def _admit(self, prompts: Sequence[list[int]]) -> int:
        manager, held = self.manager, []
        began = perf_counter_ns()
        for place, tokens in enumerate(prompts):
            request = self.request(f"admit-{place}", tokens)
            if manager.allocate_slots(request, len(tokens)) is None:
                raise RuntimeError("vllm's manager has no room for a prompt that fits its pool")
            held.append(request)
        ns = perf_counter_ns() - began
        for request in held:
            manager.free(request)
        return ns

    def hit(self) -> list[float]:
        prompts = [self.rounds.prompts[place].tolist() for place in next(self.rounds.turns)]
        return [self.sizes.scale(self._hit(prompts, self.sizes.prompt))]

    def life(self) -> list[float]:
        half, found, manager = self.rounds.half_fresh(), 0, self.manager
        prompts = self.rounds.fresh[:, : self.sizes.prompt].tolist()
        began = perf_counter_ns()
        for tokens in prompts:
            request = self.request("life", tokens)
            blocks, num_cached, *_ = manager.get_computed_blocks(request)
            found += num_cached
            manager.allocate_slots(request, len(tokens) - num_cached, num_cached, blocks)
            manager.free(request)
        ns = perf_counter_ns() - began
        expect(found, half * len(prompts))
        return [self.sizes.scale(ns)]

    def admit(self) -> list[float]:
        self.rounds.renew(0)
        return [self.sizes.scale(self._admit(self.rounds.fresh[:, : self.sizes.prompt].tolist()))]
