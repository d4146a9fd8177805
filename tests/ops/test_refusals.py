"""What the ops refuse: before anything is written, naming both sides. Each case goes through the Python face; the raw
op, which an exported program calls without it, is held to the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.ops_cases import make_batch, make_twin, paddle_batch, to_array, to_paddle

from fastkv.core.dtype import STORAGE_DTYPES
from fastkv.errors import ConfigError
from fastkv.ops import LayerCache, Rope, append_attention, copy_blocks, gather_cache, write_cache
from fastkv.ops._load import run_op
from fastkv.ops.checks import check_memory

NONE = STORAGE_DTYPES[None]


def codes(*shape: int) -> paddle.Tensor:
    return paddle.zeros(list(shape), dtype="uint8")


def floats(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.zeros(list(shape), dtype=dtype)


class Call:
    """One good append_attention call, to be spoilt: two requests, one cache; remembers the cache's bytes."""

    def __init__(self, quant_type: str = "int8") -> None:
        rng = np.random.default_rng(0)
        self.twin = make_twin(rng, quant_type)
        self.batch = make_batch(rng, [1, 3], [5, 0], block_size=4, num_blocks=8)
        self.q, self.k, self.v = floats(4, 4, 16), floats(4, 2, 16), floats(4, 2, 16)
        self.options: dict[str, Any] = {"softmax_scale": 0.25}
        layer = self.twin.layer
        self.cache = [layer.key, layer.value]
        self.before = [to_array(x).copy() for x in self.cache]

    def face(self) -> None:
        append_attention(self.q, self.k, self.v, self.twin.layer, paddle_batch(self.batch), **self.options)

    def raw(self, quant_type: str = "int8", inputs: dict[int, Any] | None = None) -> None:
        parts: list[Any] = [self.q, self.k, self.v, *self.twin.layer.op_inputs]
        batch = self.batch
        parts += [to_paddle(x) for x in (batch.block_tables, batch.query_start, batch.context_lens, batch.slot_mapping)]
        parts += [None, None, self.options.get("sinks")]
        for index, tensor in (inputs or {}).items():
            parts[index] = tensor
        options = self.options
        window = options.get("window", 0)
        run_op("fastkv_append_attention", *parts, quant_type, options["softmax_scale"], "neox", window)

    def assert_nothing_written(self) -> None:
        for tensor, before in zip(self.cache, self.before, strict=True):
            np.testing.assert_array_equal(to_array(tensor), before)


def spoil_table(value: int) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        call.batch.block_tables[0, 1] = value

    return spoil


def spoil(**changes: Any) -> Callable[[Call], None]:
    def apply(call: Call) -> None:
        for name, value in changes.items():
            if name in ("slot_mapping", "context_lens", "query_start", "block_tables"):
                call.batch = replace(call.batch, **{name: np.asarray(value, getattr(call.batch, name).dtype)})
            elif hasattr(call, name):
                setattr(call, name, value)
            else:
                call.options[name] = value

    return apply


CALL_REFUSALS: dict[str, tuple[Callable[[Call], None], type[Exception], str]] = {
    "a block that a request reads is -1": (
        spoil_table(-1),
        IndexError,
        r"block_tables\[0\]\[1\] is -1, which",
    ),
    "a block id past the cache": (spoil_table(8), IndexError, r"block_tables\[0\]\[1\] is 8.*blocks 0 to 7"),
    "a slot past the cache": (
        spoil(slot_mapping=[0, 32, 5, 6]),
        IndexError,
        "slot 32 of token 1 is out of range: 8 blocks of 4 tokens have slots 0 to 31",
    ),
    "a slot below -1": (spoil(slot_mapping=[0, -2, 5, 6]), IndexError, "slot -2 of token 1"),
    "a negative context": (spoil(context_lens=[5, -1]), ConfigError, r"context_lens\[1\] is -1"),
    "a context past the table": (
        spoil(context_lens=[5, 10]),
        ConfigError,
        r"request 1 needs 4 blocks of 4 tokens for 13 positions, but block_tables has 3 columns",
    ),
    "padding with a slot": (spoil(query_start=[0, 1, 3]), ConfigError, "token 3 is padding .* but its slot is"),
    "a negative window": (spoil(window=-1), ConfigError, "window is -1"),
    "heads that share nothing": (
        spoil(q=floats(4, 3, 16)),
        ConfigError,
        r"multiple of 2 kv_heads.*float32 \[4, 3, 16\]",
    ),
    "queries of another length": (spoil(q=floats(4, 4, 8)), ConfigError, r"heads of 16.*float32 \[4, 4, 8\]"),
    "keys of another length": (
        spoil(k=floats(4, 2, 8)),
        ConfigError,
        "k has 2 heads of 8, but key_cache holds 2 heads of",
    ),
    "values of other heads": (spoil(v=floats(4, 1, 16)), ConfigError, "v has 1 heads of 16, but value_cache holds 2"),
    "fewer keys than queries": (spoil(k=floats(3, 2, 16)), ConfigError, r"the same tokens.*k is float32 \[3, 2, 16\]"),
    "two dtypes": (
        spoil(v=floats(4, 2, 16, dtype="bfloat16")),
        ConfigError,
        r"q, k and v must have one dtype.*v is bfloat16",
    ),
    "float64": (spoil(q=floats(4, 4, 16, dtype="float64")), ConfigError, "q must be float32, float16 or bfloat16"),
    "sinks of another size": (spoil(sinks=floats(2)), ConfigError, r"sinks must be \[4\].*but is float32 \[2\]"),
}


@pytest.mark.parametrize("case", CALL_REFUSALS)
def test_append_attention_refuses_and_writes_nothing(case: str) -> None:
    spoil_call, error, message = CALL_REFUSALS[case]
    call = Call()
    spoil_call(call)
    with pytest.raises(error, match=message):
        call.face()
    call.assert_nothing_written()
    with pytest.raises(error, match=message):
        call.raw()
    call.assert_nothing_written()


def test_append_attention_face_refuses_what_an_op_cannot_see() -> None:
    """Paddle hands an op a contiguous copy of a strided tensor, so only Python can tell."""
    call = Call()
    call.k = floats(2, 4, 16).transpose([1, 0, 2])
    with pytest.raises(ConfigError, match=r"k is float32 \[4, 2, 16\] with strides .*not contiguous"):
        call.face()
    call = Call()
    call.q = np.zeros((4, 4, 16), np.float32)
    with pytest.raises(ConfigError, match="q must be a Paddle tensor.*a ndarray"):
        call.face()
    call = Call()
    latent = LayerCache(NONE, floats(8, 1, 4, 16))
    with pytest.raises(ConfigError, match="needs a key and a value cache, but got a latent one"):
        append_attention(call.q, call.k, call.v, latent, paddle_batch(call.batch), softmax_scale=1.0)
    call.assert_nothing_written()


def test_tensor_on_another_device_is_refused_with_a_way_out() -> None:
    """No GPU is needed to see it: the check asks the tensor's place."""
    on_gpu = SimpleNamespace(place=SimpleNamespace(is_cpu_place=lambda: False))
    with pytest.raises(ConfigError, match="key_cache is on .*CPU kernels only; move it with .cpu"):
        check_memory(on_gpu, "key_cache")


def test_append_attention_refuses_positions_past_the_rotary_tables() -> None:
    call = Call()
    call.options["rope"] = Rope(floats(5, 8), floats(5, 8))
    with pytest.raises(IndexError, match="request 0 reaches position 5, but the rotary tables end at 4"):
        call.face()
    call.options["rope"] = Rope(floats(50, 9), floats(50, 9))
    with pytest.raises(ConfigError, match="rotary_dim is 18; it must be from 2 to head_dim 16"):
        call.face()
    call.assert_nothing_written()


RAW_REFUSALS: dict[str, tuple[dict[int, Any], str, str]] = {
    "unknown type": ({}, "int9", "unknown kv_cache_quant_type 'int9'; allowed: none, int8"),
    "logical dtype": (
        {3: floats(8, 2, 4, 16, dtype="bfloat16")},
        "int8",
        r"int8 stores uint8, but key_cache is bfloat16 \[8, 2, 4, 16\]: allocate it from CacheSpec",
    ),
    "codes, unquantised": ({}, "none", r"none stores the model's dtype, but key_cache is uint8 \[8, 2, 4, 16\]"),
    "cache of another model dtype": (
        {3: floats(8, 2, 4, 16, dtype="float16"), 4: floats(8, 2, 4, 16), 5: None, 6: None},
        "none",
        r"none stores float32, but key_cache is float16 \[8, 2, 4, 16\]",
    ),
    "int4's halved rows": ({}, "int4_zp", "int4_zp needs key_scale, .*64.*per channel|k has 2 heads of 16.*32"),
    "no scale": ({5: None}, "int8", r"int8 needs key_scale, float32 \[32\] \(per channel\) or \[2\] .*none was given"),
    "scale of another size": ({6: floats(3)}, "int8", r"needs value_scale, .*but it is float32 \[3\]"),
    "scale of another dtype": ({5: floats(32, dtype="float64")}, "int8", r"key_scale, .*but it is float64 \[32\]"),
    "zero point too many": ({7: floats(32)}, "int8", "int8 takes no key_zero_point"),
    "zero point missing": ({}, "int8_zp", "int8_zp needs key_zero_point"),
    "dynamic scale of another shape": (
        {},
        "block_wise_fp8",
        r"key_scale must .* \[8, 2, 4\], but is float32 \[32\]",
    ),
    "value of other blocks": ({4: codes(7, 2, 4, 16)}, "int8", r"must agree in blocks.*\[8, 2, 4\] and \[7, 2, 4\]"),
    "three dimensions": ({3: codes(8, 2, 64)}, "int8", r"key_cache must be \[blocks, kv_heads.*uint8 \[8, 2, 64\]"),
    "int64 tables": ({9: paddle.zeros([2, 3], dtype="int64")}, "int8", "block_tables must be int32, but is int64"),
    "int32 slots": ({12: paddle.zeros([4], dtype="int32")}, "int8", "slot_mapping must be int64, but is int32"),
    "too few starts": ({10: paddle.zeros([2], dtype="int32")}, "int8", r"query_start must be \[3\]"),
    "starts from 1": ({10: paddle.ones([3], dtype="int32")}, "int8", r"query_start\[0\] is 1; it must be 0"),
    "starts that fall": ({10: to_paddle(np.array([0, 2, 1], np.int32))}, "int8", r"query_start\[2\] is 1, less than"),
    "starts past q": ({10: to_paddle(np.array([0, 2, 9], np.int32))}, "int8", "query_start ends at 9, but q has 4"),
    "cos without sin": ({13: floats(50, 8)}, "int8", "rope_cos and rope_sin must be given together"),
    "sin of another shape": (
        {13: floats(50, 8), 14: floats(50, 7)},
        "int8",
        "rope_sin must be .*shape of rope_cos",
    ),
    "rows too long": ({0: floats(4, 4, 1025)}, "int8", "a last dimension of 1 to 1024"),
}


@pytest.mark.parametrize("case", RAW_REFUSALS)
def test_raw_op_refuses_and_writes_nothing(case: str) -> None:
    inputs, quant_type, message = RAW_REFUSALS[case]
    call = Call()
    with pytest.raises(ConfigError, match=message):
        call.raw(quant_type, inputs)
    call.assert_nothing_written()


def test_write_cache_refuses_and_writes_nothing() -> None:
    call = Call()
    layer, slots = call.twin.layer, to_paddle(np.array([0, 1, 2, 3]))
    with pytest.raises(IndexError, match="slot 32 of token 0"):
        write_cache(call.k, call.v, layer, slots + 32)
    with pytest.raises(ConfigError, match=r"slot_mapping must be \[4\] \(tokens of k\), but is int64 \[3\]"):
        write_cache(call.k, call.v, layer, slots[:3].contiguous())
    with pytest.raises(ConfigError, match=r"slot_mapping must be int64 \[num_tokens\], but is int32"):
        write_cache(call.k, call.v, layer, slots.astype("int32"))
    with pytest.raises(ConfigError, match="v must be given"):
        write_cache(call.k, None, layer, slots)
    with pytest.raises(ConfigError, match="same dtype and tokens"):
        write_cache(call.k, call.v.astype("float16"), layer, slots)
    with pytest.raises(ConfigError, match="v and value_cache must be given together"):
        run_op("fastkv_write_cache", call.k, None, *layer.op_inputs, slots, "int8")
    call.assert_nothing_written()


def test_gather_cache_refuses() -> None:
    layer = Call().twin.layer
    with pytest.raises(IndexError, match="slot -1 of token 1 is out of range"):
        gather_cache(layer, to_paddle(np.array([0, -1])))
    with pytest.raises(IndexError, match="slot 32 of token 0 is out of range"):
        gather_cache(layer, to_paddle(np.array([32])))
    with pytest.raises(ConfigError, match=r"slots must be int64 \[n\], but is int32"):
        gather_cache(layer, to_paddle(np.array([0], np.int32)))


def test_gather_cache_into_wrong_tensors_refused_and_nothing_written() -> None:
    layer = Call().twin.layer
    slots = to_paddle(np.array([0, 1]))
    shapes = [[2, *layer.key.shape[1::2]], [2, *layer.value.shape[1::2]]]
    key_out, value_out = (paddle.zeros(shape) for shape in shapes)
    with pytest.raises(ConfigError, match="out must be a pair"):
        gather_cache(layer, slots, (key_out, None))
    for wrong in (paddle.zeros([3, *shapes[1][1:]]), value_out.astype("float64"), value_out[0]):
        with pytest.raises(ConfigError, match=r"out must be float32 \[2, "):
            gather_cache(layer, slots, (key_out, wrong))
    assert not key_out.numpy().any()


COPY_REFUSALS = {
    "source past the end": ([6], [0], IndexError, r"src_ids\[0\] is block 6, but tensor 1 has blocks 0 to 5"),
    "destination past the end": ([0], [6], IndexError, r"dst_ids\[0\] is block 6, but tensor 1"),
    "negative": ([-1], [0], IndexError, r"src_ids\[0\] is block -1"),
    "one destination twice": ([0, 1], [3, 3], ConfigError, "block 3 is the destination of two copies"),
    "a chain": ([0, 1], [1, 2], ConfigError, "block 1 is the source of one copy and the destination of another"),
    "onto itself": ([2], [2], ConfigError, "block 2 is the source of one copy and the destination"),
    "lengths that differ": ([0, 1], [2], ConfigError, r"dst_ids must be \[2\].*but is int64 \[1\]"),
}


@pytest.mark.parametrize("case", COPY_REFUSALS)
def test_copy_blocks_refuses_and_copies_nothing(case: str) -> None:
    src, dst, error, message = COPY_REFUSALS[case]
    tensors = [to_paddle(np.arange(n * 3, dtype=np.float32).reshape(n, 3)) for n in (8, 6)]
    before = [tensor.numpy().copy() for tensor in tensors]
    with pytest.raises(error, match=message):
        copy_blocks(tensors, to_paddle(np.array(src)), to_paddle(np.array(dst)))
    for tensor, expected in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected)


def test_copy_blocks_refuses_what_is_no_block_tensor() -> None:
    ids = to_paddle(np.array([0]))
    with pytest.raises(ConfigError, match=r"tensors\[1\] is float32 .*not contiguous"):
        copy_blocks([floats(4, 4), floats(4, 8)[:, ::2]], ids, ids)
    with pytest.raises(ConfigError, match=r"tensors\[0\] must be a Paddle tensor.*a ndarray"):
        copy_blocks([np.zeros((4, 4))], ids, ids)
    with pytest.raises(ConfigError, match=r"tensors\[0\] must have at least one block"):
        copy_blocks([paddle.zeros([0, 4])], ids, ids)
    with pytest.raises(ConfigError, match=r"src_ids must be int64, but is int32"):
        copy_blocks([floats(4, 4)], ids.astype("int32"), ids)
