"""The table of quantisation types and resolve_cache_dtype."""

from __future__ import annotations

import pytest

from fastkv.core.dtype import (
    ALIASES,
    MODEL_DTYPES,
    STORAGE_DTYPES,
    AttentionKind,
    KVCacheQuantType,
    ScaleGranularity,
    ScaleKind,
    parse_quant_type,
    resolve_cache_dtype,
)
from fastkv.errors import ConfigError


@pytest.mark.parametrize("model_dtype", MODEL_DTYPES)
@pytest.mark.parametrize("unquantised", [None, "none"])
def test_resolve_cache_dtype_unquantised_is_the_models(unquantised: str | None, model_dtype: str) -> None:
    assert resolve_cache_dtype(unquantised, model_dtype) == model_dtype


@pytest.mark.parametrize("model_dtype", MODEL_DTYPES)
@pytest.mark.parametrize("word", [*KVCacheQuantType, *(t.value for t in KVCacheQuantType), *ALIASES])
def test_resolve_cache_dtype_quantised_is_uint8(word: str, model_dtype: str) -> None:
    assert resolve_cache_dtype(word, model_dtype) == "uint8"


@pytest.mark.parametrize("word", ["int3", "", "FP8", "uint8", 8, True, 1.0])
def test_resolve_cache_dtype_unknown_type_names_value_and_legal_ones(word: object) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_cache_dtype(word, "bfloat16")  # type: ignore[arg-type]
    assert repr(word) in str(error.value)
    assert all(t.value in str(error.value) for t in KVCacheQuantType)


@pytest.mark.parametrize("model_dtype", ["float64", "uint8", "", None, 16])
def test_resolve_cache_dtype_unsupported_model_dtype_is_refused_even_when_quantised(model_dtype: object) -> None:
    for quant_type in (None, "int8"):
        with pytest.raises(ConfigError, match="unsupported model dtype"):
            resolve_cache_dtype(quant_type, model_dtype)  # type: ignore[arg-type]


def test_parse_quant_type_aliases_name_the_same_type() -> None:
    assert parse_quant_type("fp8") is parse_quant_type("cache_fp8") is KVCacheQuantType.FLOAT8_E4M3FN


def test_table_has_a_row_for_every_type_and_only_mla_fp8_and_unquantised_leave_mha_and_gqa() -> None:
    assert set(STORAGE_DTYPES) == {None, *KVCacheQuantType}
    for row in STORAGE_DTYPES.values():
        assert row.is_legal_with(AttentionKind.MHA)
        assert row.is_legal_with(AttentionKind.GQA)
        assert row.is_legal_with(AttentionKind.MLA) == (row.quant_type in (None, KVCacheQuantType.FLOAT8_E4M3FN))
        assert row.is_legal_with(AttentionKind.DSA) == (row.quant_type is None)


def test_table_scales_agree_with_granularities() -> None:
    for row in STORAGE_DTYPES.values():
        for legal in row.granularities.values():
            assert bool(legal) == (row.scales is not ScaleKind.NONE)
            assert (ScaleGranularity.TOKEN in legal) == (row.scales is ScaleKind.DYNAMIC)
        assert (row.bound > 0) == (row.quant_type is not None)
