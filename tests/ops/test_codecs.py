"""Every codec against the reference's independent one, code by code and around every rounding boundary."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ops_cases import QUANT_TYPES, layer_of, poisoned, to_array, to_paddle

from fastkv.core.dtype import STORAGE_DTYPES, parse_quant_type
from fastkv.ops import AttentionBatch, Rope, append_attention, gather_cache, write_cache
from fastkv.ops import reference as ref
from fastkv.ops.reference_codec import (
    E4M3_VALUES,
    bfloat16_to_float32,
    dynamic_scale,
    encode_e4m3,
    float32_to_bfloat16,
    to_float32,
)

DYNAMIC_TYPES = ("block_wise_fp8", "int8_token")
STATIC_TYPES = tuple(name for name in QUANT_TYPES if name not in DYNAMIC_TYPES)
TINY = np.finfo(np.float32).tiny
WIDTH = 64  # elements a row in these tests


def neighbours(values: np.ndarray) -> np.ndarray:
    """Each value with the floats just below and just above it, and all of them negated."""
    x = np.unique(np.asarray(values, np.float32))
    around = [x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))]
    return np.concatenate([*around, *(-a for a in around)])


def boundaries(quant_type: str) -> np.ndarray:
    """Values (in steps of the scale) at and around every code, every rounding boundary, and saturation."""
    storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
    if storage.bound == 448.0:
        codes = E4M3_VALUES[:127]
    else:
        codes = np.arange(storage.code_min - 2, storage.bound + 3, dtype=np.float32)
    halfway = (codes[1:] + codes[:-1]) / 2
    return neighbours(np.concatenate([codes, halfway, [464.0, 465.0, 480.0, 1e5, 3e38, 1e-30, TINY, 0.0]]))


def specials() -> np.ndarray:
    quiet = np.array([0x7FC00000, 0xFFC00001, 0x7FFFFFFF], np.uint32).view(np.float32)
    return np.concatenate([np.array([np.inf, -np.inf, 0.0, -0.0], np.float32), quiet])


def as_rows(values: np.ndarray) -> np.ndarray:
    """[n, 1, WIDTH], padded with zeros."""
    rows = np.zeros((-(-len(values) // WIDTH), 1, WIDTH), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows


def one_tensor(quant_type: str, slots: int, scale: np.ndarray | None, zero: np.ndarray | None) -> ref.CacheTensor:
    """A cache of one block of one head."""
    storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
    shape = (1, 1, slots, WIDTH // storage.elements_per_byte)
    return ref.CacheTensor(poisoned(shape, quant_type, "float32"), quant_type, "float32", scale, zero)


def check_encode(quant_type: str, values: np.ndarray, scale: np.ndarray | None, zero: np.ndarray | None) -> None:
    """The op and the reference write the same bytes for the values, and read the same values back."""
    rows = as_rows(values)
    cache = one_tensor(quant_type, len(rows), scale, zero)
    layer = layer_of(cache, cache)
    slots = np.arange(len(rows))
    write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(slots))
    ref.write_cache(rows, None, cache, None, slots)
    np.testing.assert_array_equal(to_array(layer.key), cache.data)
    np.testing.assert_array_equal(to_array(layer.value), cache.data)
    if quant_type in DYNAMIC_TYPES:
        np.testing.assert_array_equal(to_array(layer.key_scale), cache.scale)
    keys, _ = gather_cache(layer, to_paddle(slots))
    np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(cache, slots))


@pytest.mark.parametrize("quant_type", STATIC_TYPES)
@pytest.mark.parametrize("scale", [1.0, 0.037, 3e-7, 2.0**-126, 2.0**126])
def test_encode_around_every_boundary_equals_reference(isa: str, quant_type: str, scale: float) -> None:
    has_zero_point = STORAGE_DTYPES[parse_quant_type(quant_type)].has_zero_point
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate([boundaries(quant_type) * np.float32(scale), specials()])
    for zero_point in (0.0, 0.5, -3.25, 117.0) if has_zero_point else (None,):
        zero = None if zero_point is None else np.full(1, zero_point, np.float32)
        check_encode(quant_type, values, np.full(1, scale, np.float32), zero)


@pytest.mark.parametrize("quant_type", STATIC_TYPES)
def test_encode_per_channel_equals_reference(rng: np.random.Generator, isa: str, quant_type: str) -> None:
    """Random values: x * (1 / scale) + zero_point rounds three times, in this order, on every instruction set."""
    has_zero_point = STORAGE_DTYPES[parse_quant_type(quant_type)].has_zero_point
    values = (rng.standard_normal(200 * WIDTH) * 10.0 ** rng.integers(-3, 3, 200 * WIDTH)).astype(np.float32)
    scale = rng.uniform(0.001, 2.0, WIDTH).astype(np.float32)
    zero = rng.uniform(-20, 20, WIDTH).astype(np.float32) if has_zero_point else None
    check_encode(quant_type, values, scale, zero)


@pytest.mark.parametrize("quant_type", DYNAMIC_TYPES)
@pytest.mark.parametrize("magnitude", [1.0, 448.0, 1e-30, 1e-38, 1e-44, 3.4e38, 0.0])
def test_dynamic_scales_and_codes_equal_reference(
    rng: np.random.Generator, isa: str, quant_type: str, magnitude: float
) -> None:
    """Rows of every magnitude, subnormal and near overflow included."""
    values = (rng.uniform(-1, 1, 40 * WIDTH) * magnitude).astype(np.float32)
    check_encode(quant_type, values, np.full((1, 1, 40), np.nan, np.float32), None)


@pytest.mark.parametrize(("quant_type", "bound"), [("block_wise_fp8", 448), ("int8_token", 127)])
def test_dynamic_scale_ignores_nan_and_caps_infinity(isa: str, quant_type: str, bound: int) -> None:
    rows = np.ones((3, 1, WIDTH), np.float32)
    rows[0, 0, 5], rows[1, 0, 7], rows[2, 0, :] = np.nan, -np.inf, np.nan
    check_encode(quant_type, rows.reshape(-1), np.full((1, 1, 3), np.nan, np.float32), None)
    scales = dynamic_scale(quant_type, rows)[:, 0]
    np.testing.assert_array_equal(
        scales, np.array([1, np.finfo(np.float32).max, TINY * bound], np.float32) / np.float32(bound)
    )


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_decode_of_all_256_bytes_equals_reference(rng: np.random.Generator, isa: str, quant_type: str) -> None:
    storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, -1, WIDTH // storage.elements_per_byte)
    scale = rng.uniform(0.1, 2.0, WIDTH).astype(np.float32)
    zero = rng.uniform(-5, 5, WIDTH).astype(np.float32) if storage.has_zero_point else None
    if quant_type in DYNAMIC_TYPES:
        scale = rng.uniform(0.1, 2.0, codes.shape[:3]).astype(np.float32)
    cache = ref.CacheTensor(codes, quant_type, "float32", scale, zero)
    slots = np.arange(codes.shape[2])
    keys, _ = gather_cache(layer_of(cache, cache), to_paddle(slots))
    np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(cache, slots))


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_every_code_survives_decode_and_encode(isa: str, quant_type: str) -> None:
    """A value that a code stands for is stored as that code again (NaN: as the one canonical NaN)."""
    storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, -1, WIDTH // storage.elements_per_byte)
    if quant_type in ("int8", "int8_token"):
        codes[codes == 0] = 1  # -128 is no code of the symmetric types
    is_dynamic = quant_type in DYNAMIC_TYPES
    scale = np.ones(codes.shape[:3] if is_dynamic else 1, np.float32)
    zero = np.zeros(1, np.float32) if storage.has_zero_point else None
    layer = layer_of(*[ref.CacheTensor(codes, quant_type, "float32", scale, zero)] * 2)
    slots = to_paddle(np.arange(codes.shape[2]))
    keys, values = gather_cache(layer, slots)
    if is_dynamic:  # let each row's largest magnitude be the bound, so that its scale is 1 again
        keys[:, :, 0] = storage.bound
        codes[..., 0] = 0x7E if storage.is_float8 else 0xFF
    write_cache(keys, values, layer, slots)
    expected = np.where((codes & 0x7F) == 0x7F, 0x7F, codes) if storage.bound == 448.0 else codes
    if storage.has_zero_point and storage.bound == 448.0:
        expected = np.where(expected == 0x80, 0, expected)  # -0.0 + a zero point of 0.0 is 0.0
    np.testing.assert_array_equal(to_array(layer.key), expected)


def test_fp8_saturates_and_keeps_nan() -> None:
    values = np.array([448.0, 449.0, 1e30, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    np.testing.assert_array_equal(encode_e4m3(values), [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F])
    rows = as_rows(values)
    cache = one_tensor("float8_e4m3fn", 1, np.ones(1, np.float32), None)
    layer = layer_of(cache, cache)
    write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(np.arange(1)))
    read = gather_cache(layer, to_paddle(np.arange(1)))[0].numpy().reshape(-1)[: len(values)]
    np.testing.assert_array_equal(read, [448, 448, 448, 448, -448, np.nan, np.nan])


def test_integer_types_store_nan_as_zero() -> None:
    for quant_type, zero_point, code in (("int8", None, 128), ("int8_zp", 2.5, 130), ("int4_zp", -1.5, 6)):
        zero = None if zero_point is None else np.full(1, zero_point, np.float32)
        cache = one_tensor(quant_type, 1, np.ones(1, np.float32), zero)
        layer = layer_of(cache, cache)
        rows = np.full((1, 1, WIDTH), np.nan, np.float32)
        write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(np.arange(1)))
        byte = code * 17 if quant_type == "int4_zp" else code
        np.testing.assert_array_equal(to_array(layer.key), byte)


def test_int4_low_nibble_is_the_even_index() -> None:
    cache = one_tensor("int4_zp", 1, np.ones(1, np.float32), np.zeros(1, np.float32))
    layer = layer_of(cache, cache)
    rows = np.tile(np.array([1.0, -8.0], np.float32), WIDTH // 2).reshape(1, 1, WIDTH)
    write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(np.arange(1)))
    np.testing.assert_array_equal(to_array(layer.key), 9)  # 1 + 8 low, -8 + 8 high


def test_e4m3_table_equals_the_format_definition() -> None:
    """Spot values of OCP's e4m3: smallest subnormal and normal, one, largest; 0x7F is NaN, nothing is infinite."""
    assert E4M3_VALUES[1] == 2.0**-9
    assert E4M3_VALUES[8] == 2.0**-6
    assert E4M3_VALUES[0x38] == 1.0
    assert E4M3_VALUES[0x7E] == 448.0
    assert np.isnan(E4M3_VALUES[[0x7F, 0xFF]]).all()
    assert np.isfinite(np.delete(E4M3_VALUES, [0x7F, 0xFF])).all()
    assert (np.diff(E4M3_VALUES[:0x7F]) > 0).all()


@pytest.mark.parametrize("model_dtype", ["float16", "bfloat16"])
def test_half_precision_of_all_65536_codes_and_boundaries(isa: str, model_dtype: str) -> None:
    """Decoding through gather_cache; encoding by writing the same rows back, which goes by float32."""
    bits = np.arange(65536, dtype=np.uint16)
    data = bits.view(np.float16) if model_dtype == "float16" else bits
    cache = ref.CacheTensor(data.reshape(1, 1, -1, WIDTH).copy(), "none", model_dtype)
    slots = np.arange(cache.block_size)
    layer = layer_of(cache, cache)
    keys, _ = gather_cache(layer, to_paddle(slots))
    np.testing.assert_array_equal(keys.numpy(), cache.read(slots))
    # every code but NaN must come back as it was
    write_cache(layer.key.reshape([-1, 1, WIDTH]).clone(), layer.value.reshape([-1, 1, WIDTH]).clone(), layer,
                to_paddle(slots))  # fmt: skip
    after = to_array(layer.key).reshape(-1)
    is_nan = np.isnan(to_float32(data, model_dtype))
    np.testing.assert_array_equal(after.view(np.uint16)[~is_nan], bits[~is_nan])
    assert np.isnan(to_float32(after, model_dtype)[is_nan]).all()


def test_bfloat16_reference_rounds_half_to_even() -> None:
    one = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    np.testing.assert_array_equal(float32_to_bfloat16(one), [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80])
    assert np.isnan(bfloat16_to_float32(float32_to_bfloat16(np.array([np.nan], np.float32))))[0]


def test_row_lengths_that_fill_no_vector_register(rng: np.random.Generator, isa: str) -> None:
    """Remainders of vectorised loops, for every type; long rows with a NaN, which loops leave to scalar code."""
    for quant_type in QUANT_TYPES:
        for dim in (2, 6, 14, 18, 30, 34, 80):
            storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
            is_dynamic = quant_type in DYNAMIC_TYPES
            scale = np.full((1, 1, 2) if is_dynamic else 1, 0.05, np.float32)
            zero = np.full(1, 1.25, np.float32) if storage.has_zero_point else None
            data = np.zeros((1, 1, 2, dim // storage.elements_per_byte), np.uint8)
            cache = ref.CacheTensor(data, quant_type, "float32", scale, zero)
            layer = layer_of(cache, cache)
            rows = rng.standard_normal((2, 1, dim)).astype(np.float32)
            if dim > 32:
                rows[0, 0, 3] = rows[1, 0, -1] = np.nan
            write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(np.arange(2)))
            ref.write_cache(rows, None, cache, None, np.arange(2))
            np.testing.assert_array_equal(to_array(layer.key), cache.data)
            keys, _ = gather_cache(layer, to_paddle(np.arange(2)))
            np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(cache, np.arange(2)))


@pytest.mark.parametrize("model_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("quant_type", ["none", *QUANT_TYPES])
def test_many_tokens_past_the_caches_equal_reference(
    rng: np.random.Generator, isa: str, quant_type: str, model_dtype: str
) -> None:
    """So many elements that copies and decoded rows are streamed; runs of slots that blocks, gaps and -1 interrupt."""
    tokens, heads, dim, block_size = 600, 8, 128, 64
    storage = STORAGE_DTYPES[parse_quant_type(quant_type)]
    blocks = tokens // block_size + 2
    is_dynamic = quant_type in DYNAMIC_TYPES
    scale = zero = None
    if quant_type != "none":
        scale = np.full((blocks, heads, block_size) if is_dynamic else heads * dim, 0.04, np.float32)
    if storage.has_zero_point:
        zero = rng.uniform(-2, 2, heads * dim).astype(np.float32)
    shape = (blocks, heads, block_size, dim // storage.elements_per_byte)
    cache = ref.CacheTensor(poisoned(shape, quant_type, model_dtype), quant_type, model_dtype, scale, zero)
    layer = layer_of(cache, cache)
    order = rng.permutation(blocks)[: tokens // block_size + 1]
    slots = (order[:, None] * block_size + np.arange(block_size)).reshape(-1)[:tokens]
    slots[100:103] = slots[100:103][::-1]
    rows = random_model_rows(rng, (tokens, heads, dim), model_dtype)
    written = slots.copy()
    written[[0, 17, tokens - 1]] = -1
    write_cache(to_paddle(rows), to_paddle(rows), layer, to_paddle(written))
    ref.write_cache(rows, None, cache, None, written)
    np.testing.assert_array_equal(to_array(layer.key), cache.data)
    np.testing.assert_array_equal(to_array(layer.value), cache.data)
    read = np.delete(slots, [0, 17, tokens - 1])
    keys, _ = gather_cache(layer, to_paddle(read))
    np.testing.assert_array_equal(keys.numpy(), ref.gather_cache(cache, read))


def random_model_rows(rng: np.random.Generator, shape: tuple[int, ...], model_dtype: str) -> np.ndarray:
    """Normal numbers in a model dtype, as the reference holds them."""
    rows = rng.standard_normal(shape).astype(np.float32)
    if model_dtype == "bfloat16":
        return float32_to_bfloat16(rows)
    return rows.astype(model_dtype)


@pytest.mark.parametrize("model_dtype", ["float16", "bfloat16"])
def test_rotary_result_is_rounded_once_to_the_cache_dtype(rng: np.random.Generator, isa: str, model_dtype: str) -> None:
    """A rotated key is float32 until it is stored: values around every rounding boundary of the half types."""
    tokens = 512
    angles = rng.uniform(-3, 3, (tokens, WIDTH // 2)).astype(np.float32)
    tables = ref.RopeTables(np.cos(angles), np.sin(angles))
    spread = (10.0 ** rng.uniform(-9, 5, (tokens, 1, WIDTH))).astype(np.float32)
    rows = np.asarray(rng.standard_normal((tokens, 1, WIDTH)) * spread, np.float32)
    rows = float32_to_bfloat16(rows) if model_dtype == "bfloat16" else np.clip(rows, -6e4, 6e4).astype(np.float16)
    cache = ref.CacheTensor(poisoned((1, 1, tokens, WIDTH), "none", model_dtype), "none", model_dtype)
    layer = layer_of(cache, cache)
    batch = AttentionBatch.from_numpy(
        np.zeros((1, 1), np.int32), np.array([0, tokens], np.int32), np.zeros(1, np.int32), np.arange(tokens)
    )
    x = to_paddle(rows)
    append_attention(x, x, x, layer, batch, softmax_scale=0.0, rope=Rope(to_paddle(tables.cos), to_paddle(tables.sin)))
    with np.errstate(over="ignore"):
        rotated = np.stack([ref.rotate(to_float32(rows[t], model_dtype), t, tables) for t in range(tokens)])
        cache.write(np.arange(tokens), rotated)
    np.testing.assert_array_equal(to_array(layer.key), cache.data)
