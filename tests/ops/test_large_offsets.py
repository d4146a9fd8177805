"""Offsets past 32 bits. The caches are sparse: anonymous memory whose untouched pages don't exist, so a cache of 16 GiB
costs what the few written blocks cost. FlashInfer and vLLM both met kernels that wrapped around here."""

from __future__ import annotations

import mmap
import resource
import traceback

import numpy as np
import pytest
from helpers.ops_cases import layer_of, make_batch, paddle_batch, to_paddle
from paddle.utils.dlpack import from_dlpack

from fastkv.core.dtype import STORAGE_DTYPES, KVCacheQuantType
from fastkv.ops import LayerCache, StaticScales, append_attention, copy_blocks, gather_cache, write_cache
from fastkv.ops import reference as ref

KV_HEADS, BLOCK_SIZE, DIM = 2, 64, 128  # 16,384 codes a block
NUM_BLOCKS = 2**20 + 4  # block 1,048,576 starts at byte 2^34 exactly
FAR = (2**17 - 1, 2**17, 2**20, 2**20 + 3)  # element 2^31 - 1 ends one block, 2^31 starts the next


def sparse(blocks: int) -> np.ndarray:
    """uint8 [blocks, KV_HEADS, BLOCK_SIZE, DIM] of zeros without memory behind it. (Paddle's own indexing copies such
    a tensor whole: look at it through NumPy.)"""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    size = blocks * KV_HEADS * BLOCK_SIZE * DIM
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"this machine does not map {size} bytes sparsely: {error}")
    return np.frombuffer(memory, np.uint8).reshape(blocks, KV_HEADS, BLOCK_SIZE, DIM)


def test_blocks_past_2_to_the_31_elements_behave_like_near_ones(rng: np.random.Generator) -> None:
    """Write, attend, gather and copy in far blocks equal the same in a cache of eight blocks."""
    try:
        compare_far_with_near(rng)
    except Exception:  # pytest would print the tensors of each frame, and so read 32 GiB into existence
        pytest.fail(traceback.format_exc(), pytrace=False)


def compare_far_with_near(rng: np.random.Generator) -> None:
    scale = rng.uniform(0.02, 0.04, KV_HEADS * DIM).astype(np.float32)
    keys, values = sparse(NUM_BLOCKS), sparse(NUM_BLOCKS)
    static = StaticScales(scale, scale)
    far = LayerCache(STORAGE_DTYPES[KVCacheQuantType.INT8], from_dlpack(keys), from_dlpack(values), static=static)
    cache = ref.CacheTensor(np.zeros((8, KV_HEADS, BLOCK_SIZE, DIM), np.uint8), "int8", "float32", scale)
    near = layer_of(cache, cache)

    tokens = 3 * BLOCK_SIZE + 1
    batch = make_batch(rng, [tokens], [0], BLOCK_SIZE, num_blocks=8)
    to_far = np.zeros(8, np.int64)
    to_far[batch.block_tables[0, :4]] = FAR
    far_batch = ref.Batch(
        np.append(to_far[batch.block_tables[:, :4]], [[-1]], axis=1).astype(np.int32),
        batch.query_start,
        batch.context_lens,
        to_far[batch.slot_mapping // BLOCK_SIZE] * BLOCK_SIZE + batch.slot_mapping % BLOCK_SIZE,
    )
    rows = [to_paddle(rng.standard_normal((tokens, n, DIM)).astype(np.float32)) for n in (4, KV_HEADS, KV_HEADS)]
    out_far = append_attention(*rows, far, paddle_batch(far_batch), softmax_scale=0.1)
    out_near = append_attention(*rows, near, paddle_batch(batch), softmax_scale=0.1)
    np.testing.assert_array_equal(out_far.numpy(), out_near.numpy())

    for cache_far, cache_near in zip(
        gather_cache(far, to_paddle(far_batch.slot_mapping)),
        gather_cache(near, to_paddle(batch.slot_mapping)),
        strict=True,
    ):
        np.testing.assert_array_equal(cache_far.numpy(), cache_near.numpy())

    last = to_paddle(np.array([NUM_BLOCKS * BLOCK_SIZE - 1]))
    one = to_paddle(np.full((1, KV_HEADS, DIM), 1.5, np.float32))
    write_cache(one, one, far, last)
    np.testing.assert_allclose(gather_cache(far, last)[0].numpy(), 1.5, atol=0.03)

    # block 2^20 over block 5, whose bytes a 32-bit offset would have wrapped to block 0's neighbourhood
    copy_blocks([far.key], to_paddle(np.array([2**20])), to_paddle(np.array([5])))
    np.testing.assert_array_equal(keys[5], keys[2**20])
    assert keys[5].any()
    assert not keys[:5].any(), "a write wrapped around"
    assert not values[:64].any(), "a write wrapped around"
    used_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert used_mib < 4096, "untouched pages became memory"
