"""The ops inside to_static and paddle.jit.save: InferShape and InferDtype are set, in-place writes land."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
from helpers.ops_cases import make_batch, make_twin, paddle_batch, to_paddle

from fastkv.ops import AttentionBatch, append_attention, append_attention_qkv, gather_cache, write_cache
from fastkv.ops._load import run_op
from fastkv.ops.cache import LayerCache


class OneLayer(paddle.nn.Layer):
    """Attention over a given cache, with something behind it."""

    def __init__(self, layer: LayerCache) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v, tables, starts, lengths, slots):
        batch = AttentionBatch(tables, starts, lengths, slots)
        return append_attention(q, k, v, self.layer, batch, softmax_scale=0.25) * 2.0


class RawOp(paddle.nn.Layer):
    """The op itself; caches are inputs of the graph, as an exported program needs them."""

    def forward(self, q, k, v, key_cache, value_cache, tables, starts, lengths, slots):
        absent = [None] * 4
        inputs = [q, k, v, key_cache, value_cache, *absent, tables, starts, lengths, slots, None, None, None]
        return run_op("fastkv_append_attention", *inputs, "none", 0.25, "neox", 0)[0] * 2.0


def step(rng: np.random.Generator) -> tuple[list[paddle.Tensor], AttentionBatch]:
    batch = paddle_batch(make_batch(rng, [3, 2], [0, 0], block_size=4, num_blocks=8))
    rows = [to_paddle(rng.standard_normal((5, heads, 16)).astype(np.float32)) for heads in (4, 2, 2)]
    return rows, batch


def batch_inputs(batch: AttentionBatch) -> list[paddle.Tensor]:
    return [batch.block_tables, batch.query_start, batch.context_lens, batch.slot_mapping]


def test_to_static_of_raw_op_equals_dynamic(rng: np.random.Generator) -> None:
    rows, batch = step(rng)
    dynamic, static = make_twin(rng).layer, make_twin(rng).layer
    layer = RawOp()
    expected = layer(*rows, dynamic.key, dynamic.value, *batch_inputs(batch))
    traced = paddle.jit.to_static(layer, full_graph=True)
    actual = traced(*rows, static.key, static.value, *batch_inputs(batch))
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    np.testing.assert_array_equal(static.key.numpy(), dynamic.key.numpy())


def test_to_static_of_python_face_writes_the_cache_it_closes_over(rng: np.random.Generator) -> None:
    rows, batch = step(rng)
    dynamic, static = make_twin(rng).layer, make_twin(rng).layer
    expected = OneLayer(dynamic)(*rows, *batch_inputs(batch))
    actual = paddle.jit.to_static(OneLayer(static), full_graph=True)(*rows, *batch_inputs(batch))
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    np.testing.assert_array_equal(static.key.numpy(), dynamic.key.numpy())


def test_to_static_of_fused_projection_equals_dynamic(rng: np.random.Generator) -> None:
    (q, k, v), batch = step(rng)
    dynamic, static = make_twin(rng).layer, make_twin(rng).layer
    qkv = paddle.concat([x.flatten(1) for x in (q, k, v)], axis=1)

    def attend(x, tables, starts, lengths, slots):
        return append_attention_qkv(x, static, AttentionBatch(tables, starts, lengths, slots), softmax_scale=0.25)

    expected = append_attention_qkv(qkv, dynamic, batch, softmax_scale=0.25)
    actual = paddle.jit.to_static(attend, full_graph=True)(qkv, *batch_inputs(batch))
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    np.testing.assert_array_equal(static.key.numpy(), dynamic.key.numpy())


def test_saved_program_loads_and_runs_the_op(rng: np.random.Generator, tmp_path: Path) -> None:
    rows, batch = step(rng)
    dynamic, loaded = make_twin(rng).layer, make_twin(rng).layer
    layer = RawOp()
    expected = layer(*rows, dynamic.key, dynamic.value, *batch_inputs(batch))
    inputs = [*rows, loaded.key, loaded.value, *batch_inputs(batch)]
    spec = [paddle.static.InputSpec(list(x.shape), x.dtype) for x in inputs]
    path = str(tmp_path / "program")
    paddle.jit.save(paddle.jit.to_static(layer, full_graph=True), path, input_spec=spec)
    actual = paddle.jit.load(path)(*inputs)
    np.testing.assert_array_equal(actual.numpy(), expected.numpy())


def test_write_and_gather_in_a_static_graph(rng: np.random.Generator) -> None:
    layer = make_twin(rng, "block_wise_fp8").layer

    def write_and_gather(k, slots):
        write_cache(k, k, layer, slots)
        return gather_cache(layer, slots)[0]

    k = to_paddle(rng.standard_normal((3, 2, 16)).astype(np.float32))
    slots = to_paddle(np.array([1, 9, 30]))
    read = paddle.jit.to_static(write_and_gather, full_graph=True)(k, slots)
    assert list(read.shape) == [3, 2, 16]
    np.testing.assert_allclose(read.numpy(), k.numpy(), atol=0.15)
