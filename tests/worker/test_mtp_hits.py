"""Kind "speculation": MTP layers cost no block of hits, as the token whose hidden state is missing is run once more.

A toy with two main layers and one MTP layer. The MTP state of slot i comes from (hidden state of token i-1, token i);
slot 0 has no hidden state before it, so its input is masked with zeros.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from helpers.copies import bytes_of, device_memory
from helpers.toy import toy_config

from fastkv import CacheController, CacheManager, Config
from fastkv.ops import AttentionBatch, append_attention

Rows = npt.NDArray[np.float32]
HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 16, 4, 2, 8, 4
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]  # two blocks

_rng = np.random.default_rng(11)
EMBED = _rng.standard_normal((100, HIDDEN)).astype(np.float32)


def weights(layer: int) -> tuple[Rows, Rows, Rows, Rows]:
    rng = np.random.default_rng(layer)
    columns = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    q, k, v = (rng.standard_normal((HIDDEN, n)).astype(np.float32) / 4 for n in columns)
    return q, k, v, rng.standard_normal((HEADS * DIM, HIDDEN)).astype(np.float32) / 4


class Toy:
    """The model over one controller's caches, one request at a time."""

    def __init__(self, config: Config) -> None:
        self.controller = CacheController(config)
        self.controller.initialize_all()

    def layers(self, group: str, rows: Rows, table: npt.NDArray[np.int32], first: int, written: list[bool]) -> Rows:
        """Hidden states [n, HIDDEN] of tokens at positions first, first + 1, ...; slot -1 where nothing is written."""
        positions = np.arange(first, first + len(rows))
        slots = np.where(written, table[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK, -1)
        counts = np.array([0, len(rows)], np.int32), np.array([first], np.int32)
        batch = AttentionBatch.from_numpy(table[None], *counts, slots)
        for layer in self.controller.spec.group(group).layers:
            q, k, v, out = weights(layer)
            shape = (len(rows), -1, DIM)
            qkv = (paddle.to_tensor((rows @ matrix).reshape(shape)) for matrix in (q, k, v))
            cache = self.controller.layer_cache(layer)
            attended = append_attention(*qkv, cache, batch, softmax_scale=DIM**-0.5)
            rows = rows + attended.numpy().reshape(len(rows), -1) @ out
        return rows

    def draft(self, tokens: list[int], table: npt.NDArray[np.int32], cached: int, *, run_again: bool = True) -> Rows:
        """What MTP makes of the last token; blocks of the first `cached` tokens are read and never written."""
        begin = cached - 1 if cached and run_again else cached
        positions = list(range(begin, len(tokens)))
        hidden = self.layers(
            "main", EMBED[[tokens[i] for i in positions]], table, begin, [i >= cached for i in positions]
        )
        known = {**dict(zip(positions, hidden, strict=True)), -1: np.zeros(HIDDEN, np.float32)}
        missing = np.zeros(HIDDEN, np.float32)
        rows = np.stack([EMBED[tokens[i]] + known.get(i - 1, missing) for i in range(cached, len(tokens))])
        if not cached:
            rows[0] = 0  # slot 0 is masked
        return self.layers("mtp", rows, table, cached, [True] * len(rows))[-1]


def admit(manager: CacheManager, name: str, tokens: list[int]) -> tuple[npt.NDArray[np.int32], int]:
    manager.open(name, tokens)
    found = manager.match(name)
    manager.allocate(name, manager.blocks_needed(name, len(tokens)))
    return manager.block_table(name), found.num_tokens


@pytest.mark.parametrize("quant_type", ["none", "block_wise_fp8"])
def test_mtp_full_hit_runs_one_token_again_and_keeps_every_block_of_hits(quant_type: str) -> None:
    config = toy_config(dtype="float32", quant_type=quant_type, num_device_blocks=8, num_host_blocks=0)
    toy, fresh = Toy(config), Toy(config)
    manager = CacheManager(8, BLOCK)
    first, second = [*SHARED, 50], [*SHARED, 60]

    table, cached = admit(manager, "first", first)
    assert cached == 0
    toy.draft(first, table, 0)
    manager.publish("first", len(first))

    table, cached = admit(manager, "second", second)
    assert cached == len(SHARED)  # both blocks, although the hidden state of their last token is not cached
    before = {key: memory[table[:2]].copy() for key, memory in device_memory(toy.controller).items()}
    found = toy.draft(second, table, cached)
    for (layer, role), memory in device_memory(toy.controller).items():
        np.testing.assert_array_equal(memory[table[:2]], before[layer, role], err_msg=f"layer {layer} {role.value}")

    expected = fresh.draft(second, np.arange(3, dtype=np.int32), 0)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    wrong = toy.draft(second, table, cached, run_again=False)
    assert np.abs(wrong - expected).max() > 1e-2  # the hidden state matters


def test_mtp_state_of_slot_0_depends_on_no_hidden_state() -> None:
    toy = Toy(toy_config(dtype="float32", num_device_blocks=8, num_host_blocks=0))
    mtp = toy.controller.layer_cache(toy.controller.spec.group("mtp").layers[0])
    for token, block in ((7, 0), (8, 1)):
        toy.draft([token, 1], np.array([block], np.int32), 0)
    keys = bytes_of(mtp.key).reshape(8, KV_HEADS, BLOCK, -1)
    np.testing.assert_array_equal(keys[0, :, 0], keys[1, :, 0])
    assert (keys[0, :, 1] != keys[1, :, 1]).any()  # slot 1 knows the hidden state of the token before
