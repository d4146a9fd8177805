"""Attention over the shapes that engines run, drawn at random, against the NumPy reference on every instruction set.

Row lengths of real models, groups of 1 to 16 heads, decode, verification and prefill in one ragged batch, contexts at
and around the edges of blocks and of what kernels take at once, windows, sinks, rotary tables. Caches start as NaN, so
that a row read past a request's end shows.
"""

from __future__ import annotations

import numpy as np
from helpers.ops_cases import (
    MODEL_DTYPES,
    STORAGES,
    assert_close,
    cache_tensor,
    context_slots,
    fill_context,
    layer_of,
    make_batch,
    make_twin,
    model_rows,
    paddle_batch,
    rope_tables,
    run_both,
    to_paddle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv.ops import force_isa, mla_append_attention, supported_isas
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import to_float32

HEAD_DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
BLOCK_SIZES = [16, 32, 64, 128]
CHUNKS = [16, 24, 32, 40, 64, 128, 256, 512]
"""Positions that kernels take at once, for one row length or another, and of which pieces are multiples."""


def lengths(block_size: int) -> st.SearchStrategy[int]:
    """Contexts one token around a multiple of the block size or of a chunk."""
    edge = st.sampled_from([block_size, *CHUNKS]).flatmap(lambda n: st.integers(0, 700 // n).map(lambda i: i * n))
    return st.builds(lambda at, off: max(at + off, 0), edge, st.integers(-2, 1))


QUERIES = st.one_of(st.just(1), st.integers(2, 16), st.sampled_from([17, 33, 65]))
"""New tokens: decode, verification of drafts, a chunk of a prompt."""


def small_batch(data: st.DataObject, rng: np.random.Generator, block_size: int) -> tuple[ref.Batch, int]:
    """One to three requests over exactly the blocks that they need and one more."""
    lens = data.draw(st.lists(st.tuples(QUERIES, lengths(block_size)), min_size=1, max_size=3), label="new, context")
    blocks = sum(-(-(q + c) // block_size) for q, c in lens) + 1
    return make_batch(rng, [q for q, _ in lens], [c for _, c in lens], block_size, blocks), blocks


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), isa=st.sampled_from(supported_isas()))
def test_attention_over_shapes_of_engines_matches_reference(data: st.DataObject, seed: int, isa: str) -> None:
    rng = np.random.default_rng(seed)
    storage = data.draw(st.sampled_from(STORAGES), label="storage")
    dim, value_dim = data.draw(st.sampled_from(HEAD_DIMS), label="dims")
    block_size = data.draw(st.sampled_from(BLOCK_SIZES), label="block size")
    kv_heads, group = data.draw(st.sampled_from([(1, 16), (1, 7), (2, 8), (2, 4), (3, 3), (2, 1)]), label="heads")
    batch, blocks = small_batch(data, rng, block_size)
    twin = make_twin(
        rng,
        *storage,
        blocks=blocks,
        kv_heads=kv_heads,
        block_size=block_size,
        dim=dim,
        value_dim=value_dim,
        per_head=data.draw(st.booleans(), label="scales per head"),
    )
    window = data.draw(st.one_of(st.just(0), st.integers(1, 12), lengths(block_size)), label="window")
    rotary_dim = data.draw(st.sampled_from([0, dim, dim // 2]), label="rotary dim")
    style = data.draw(st.sampled_from(["neox", "interleaved"]), label="rotary style")
    with_sinks = data.draw(st.booleans(), label="sinks")
    force_isa(isa)
    try:
        out, expected = run_both(
            rng,
            fill_context(rng, twin, batch),
            batch,
            group,
            rope=rope_tables(rotary_dim, style, 800) if rotary_dim else None,
            window=window,
            sinks=2 * rng.standard_normal(kv_heads * group).astype(np.float32) if with_sinks else None,
            softmax_scale=dim**-0.5,
        )
    finally:
        force_isa("best")
    assert_close(out, expected, storage[1])


@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), isa=st.sampled_from(supported_isas()))
def test_mla_over_shapes_of_engines_matches_reference(data: st.DataObject, seed: int, isa: str) -> None:
    """Latents short enough for the kernels of few rows, where keys and values are the same bytes, and DeepSeek's."""
    rng = np.random.default_rng(seed)
    quant_type = data.draw(st.sampled_from(["none", "float8_e4m3fn"]), label="storage")
    dtype = data.draw(st.sampled_from(MODEL_DTYPES), label="dtype")
    rank, rope_dim = data.draw(st.sampled_from([(512, 64), (128, 64), (64, 16), (64, 64), (192, 32)]), label="dims")
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16]), label="heads")
    block_size = data.draw(st.sampled_from(BLOCK_SIZES), label="block size")
    batch, blocks = small_batch(data, rng, block_size)
    cache = cache_tensor(rng, quant_type, dtype, (blocks, 1, block_size, rank + rope_dim), per_head=True)
    slots = context_slots(batch, block_size)
    cache.write(slots, to_float32(model_rows(rng, (len(slots), 1, rank + rope_dim), dtype), dtype))
    q = model_rows(rng, (len(batch.slot_mapping), heads, rank + rope_dim), dtype)
    latent = model_rows(rng, (len(batch.slot_mapping), rank + rope_dim), dtype)
    scale, layer = (rank + rope_dim) ** -0.5, layer_of(cache, None)
    force_isa(isa)
    try:
        out = mla_append_attention(
            to_paddle(q), to_paddle(latent), layer, paddle_batch(batch), kv_lora_rank=rank, softmax_scale=scale
        )
    finally:
        force_isa("best")
    expected = ref.mla_append_attention(q, latent, cache, batch, kv_lora_rank=rank, softmax_scale=scale)
    assert_close(out, expected, dtype)
