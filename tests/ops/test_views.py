"""What the views of caches, scales, batches and rotary tables refuse when they are built, naming both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from helpers.ops_cases import to_paddle

from fastkv.core.dtype import STORAGE_DTYPES, KVCacheQuantType
from fastkv.errors import ConfigError, RequestError
from fastkv.ops import AttentionBatch, LayerCache, Rope, StaticScales

INT8 = STORAGE_DTYPES[KVCacheQuantType.INT8]
INT8_ZP = STORAGE_DTYPES[KVCacheQuantType.INT8_ZP]
BLOCK_WISE = STORAGE_DTYPES[KVCacheQuantType.BLOCK_WISE_FP8]
NONE = STORAGE_DTYPES[None]


def codes(*shape: int) -> paddle.Tensor:
    return paddle.zeros(list(shape or (8, 2, 16, 64)), dtype="uint8")


def floats(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.zeros(list(shape or (8, 2, 16, 64)), dtype=dtype)


def scales(count: int = 128, value: float = 0.1) -> np.ndarray:
    return np.full(count, value, np.float32)


# --- caches ---------------------------------------------------------------------------------------------------------

CACHE_REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "logical dtype where codes are due": (
        lambda: LayerCache(INT8, floats(dtype="bfloat16"), floats(dtype="bfloat16"), static=StaticScales(scales())),
        r"^kv_cache_quant_type int8 stores uint8, but key_cache is bfloat16 \[8, 2, 16, 64\]: allocate .* CacheSpec$",
    ),
    "value in the logical dtype": (
        lambda: LayerCache(INT8, codes(), floats(), static=StaticScales(scales(), scales())),
        r"int8 stores uint8, but value_cache is float32 \[8, 2, 16, 64\]",
    ),
    "codes where nothing is quantised": (
        lambda: LayerCache(NONE, codes(), codes()),
        r"none stores the model's dtype .*, but key_cache is uint8 \[8, 2, 16, 64\]",
    ),
    "float64": (lambda: LayerCache(NONE, floats(dtype="float64"), floats()), "stores the model's dtype.*float64"),
    "three dimensions": (
        lambda: LayerCache(NONE, floats(8, 16, 64), floats()),
        r"blocks, kv_heads.*float32 \[8, 16",
    ),
    "an array": (lambda: LayerCache(NONE, np.zeros((8, 2, 16, 64)), floats()), "must be a Paddle tensor.*a ndarray"),
    "block counts that differ": (
        lambda: LayerCache(NONE, floats(), floats(9, 2, 16, 64)),
        r"must agree in blocks.*\[8, 2, 16, 64\] and float32 \[9, 2, 16, 64\]",
    ),
    "a strided cache": (
        lambda: LayerCache(NONE, floats(8, 2, 64, 16).transpose([0, 1, 3, 2]), floats()),
        r"key_cache is float32 \[8, 2, 16, 64\] with strides .*not contiguous",
    ),
    "no static scales": (lambda: LayerCache(INT8, codes(), codes()), "int8 needs static scales, but none were given"),
    "no value scale": (
        lambda: LayerCache(INT8, codes(), codes(), static=StaticScales(scales())),
        r"int8 needs value_scale, float32 \[128\] \(per channel\) or \[2\] \(per head\), but none was given",
    ),
    "scales of another size": (
        lambda: LayerCache(INT8, codes(), codes(), static=StaticScales(scales(64), scales())),
        r"needs key_scale, float32 \[128\] .* or \[2\] .*, but it is float32 \[64\]",
    ),
    "no zero point": (
        lambda: LayerCache(INT8_ZP, codes(), codes(), static=StaticScales(scales(), scales())),
        r"int8_zp needs key_zero_point, float32 \[128\]",
    ),
    "zero point per head, scale per channel": (
        lambda: LayerCache(INT8_ZP, codes(), codes(), static=StaticScales(scales(), scales(), scales(2), scales())),
        r"key_scale is float32 \[128\], but key_zero_point is float32 \[2\]",
    ),
    "a zero point that the type has not": (
        lambda: LayerCache(INT8, codes(), codes(), static=StaticScales(scales(), scales(), scales())),
        "int8 takes no key_zero_point",
    ),
    "static scales for an unquantised cache": (
        lambda: LayerCache(NONE, floats(), floats(), static=StaticScales(scales(), scales())),
        "none takes no static scales",
    ),
    "no dynamic scales": (
        lambda: LayerCache(BLOCK_WISE, codes(), codes()),
        r"block_wise_fp8 keeps its scales in the cache: key_scale must be float32 \[8, 2, 16\], but none was given",
    ),
    "dynamic scales of another shape": (
        lambda: LayerCache(BLOCK_WISE, codes(), codes(), floats(8, 2, 16), floats(8, 16, 2)),
        r"value_scale must be float32 \[8, 2, 16\], but is float32 \[8, 16, 2\]",
    ),
    "dynamic scales in the model's dtype": (
        lambda: LayerCache(BLOCK_WISE, codes(), codes(), floats(8, 2, 16, dtype="bfloat16"), floats(8, 2, 16)),
        r"key_scale must be float32 \[8, 2, 16\], but is bfloat16 \[8, 2, 16\]",
    ),
    "dynamic scales for a static type": (
        lambda: LayerCache(INT8, codes(), codes(), floats(8, 2, 16), static=StaticScales(scales(), scales())),
        "int8 keeps no key_scale in the cache",
    ),
}


@pytest.mark.parametrize("case", CACHE_REFUSALS)
def test_layer_cache_refuses(case: str) -> None:
    build, message = CACHE_REFUSALS[case]
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("value", [0.0, -0.1, np.nan, np.inf, 1e-40, 2e38])
def test_static_scale_that_cannot_be_used_is_refused(value: float) -> None:
    """Zero, negative, not finite, or with a subnormal (reciprocal): the message says which one."""
    bad = scales()
    bad[77] = value
    with pytest.raises(ConfigError, match=r"value_scale\[77\] is .*; scales must be finite, from"):
        StaticScales(scales(), bad)


def test_static_scales_of_wrong_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"key_scale must be float32.*but is float64 \[128\]"):
        StaticScales(scales().astype(np.float64))
    with pytest.raises(ConfigError, match=r"key_scale must be float32.*but is float32 \[2, 64\]"):
        StaticScales(scales().reshape(2, 64))
    with pytest.raises(ConfigError, match="key_scale must be float32"):
        StaticScales(None)
    with pytest.raises(ConfigError, match=r"key_zero_point\[3\] is nan; zero points must be finite"):
        StaticScales(scales(), scales(), np.array([0, 1, 2, np.nan], np.float32))
    assert StaticScales(to_paddle(scales())).key_scale.dtype == paddle.float32


# --- batches and rotary tables --------------------------------------------------------------------------------------


def batch_of(**changes: Any) -> AttentionBatch:
    parts: dict[str, Any] = {
        "block_tables": np.array([[0, -1], [2, 1]], np.int32),
        "query_start": np.array([0, 1, 3], np.int32),
        "context_lens": np.array([0, 3], np.int32),
        "slot_mapping": np.array([0, 11, 4], np.int64),
    }
    parts.update(changes)
    return AttentionBatch(*(to_paddle(x) if isinstance(x, np.ndarray) else x for x in parts.values()))


BATCH_REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "int64 tables": (
        {"block_tables": np.zeros((2, 2), np.int64)},
        ConfigError,
        r"must be int32 .*, but is int64",
    ),
    "flat tables": (
        {"block_tables": np.zeros(4, np.int32)},
        ConfigError,
        r"block_tables must .* int32 \[4\]",
    ),
    "a list": ({"context_lens": [0, 3]}, ConfigError, "context_lens must be a Paddle tensor.*a list"),
    "int32 slots": ({"slot_mapping": np.zeros(3, np.int32)}, ConfigError, r"int64 \[num_tokens\], but is int32 \[3\]"),
    "too few starts": ({"query_start": np.array([0, 3], np.int32)}, ConfigError, r"query_start must be int32 \[3\]"),
    "starts from 1": ({"query_start": np.array([1, 1, 3], np.int32)}, RequestError, r"ascend from 0.*\[1, 1, 3\]"),
    "starts that fall": ({"query_start": np.array([0, 2, 1], np.int32)}, RequestError, "ascend from 0"),
    "starts past the tokens": ({"query_start": np.array([0, 1, 4], np.int32)}, RequestError, "at most 3"),
    "one slot twice": ({"slot_mapping": np.array([5, -1, 5])}, RequestError, "slot 5 is given to two tokens"),
    "strided tables": (
        {"block_tables": paddle.zeros([2, 4], dtype="int32")[:, ::2]},
        ConfigError,
        "block_tables .*not contiguous",
    ),
}


@pytest.mark.parametrize("case", BATCH_REFUSALS)
def test_attention_batch_refuses(case: str) -> None:
    changes, error, message = BATCH_REFUSALS[case]
    with pytest.raises(error, match=message):
        batch_of(**changes)


def test_attention_batch_takes_no_write_twice() -> None:
    assert batch_of(slot_mapping=np.array([-1, 11, -1])).num_tokens == 3


def test_rope_refuses() -> None:
    with pytest.raises(ConfigError, match=r"rope cos must be float32.*but is float64"):
        Rope(floats(8, 4, dtype="float64"), floats(8, 4))
    with pytest.raises(ConfigError, match=r"rope cos is float32 \[8, 4\], but sin is float32 \[9, 4\]"):
        Rope(floats(8, 4), floats(9, 4))
    with pytest.raises(ConfigError, match="unknown rope style 'gptj'; allowed: neox, interleaved"):
        Rope(floats(8, 4), floats(8, 4), "gptj")
