// Codecs: how one row of float32 values becomes stored codes and back. One struct a storage type, all with the same
// two functions; kernels only see them through kernel_table.h.
//
// Compiled once an instruction set with floating-point contraction off: x * inverse + zero_point must round twice, as
// NumPy does, or codes would differ in the last bit between CPUs. fastkv/ops/reference.py holds the same arithmetic.
//
// Integer types have no NaN: a NaN is encoded as 0.0 would be. float8 saturates at its bound and keeps NaN.
#pragma once

#include "fastkv/encode8.h"
#include "fastkv/floats.h"
#include "fastkv/kernel_table.h"

namespace fastkv::FASTKV_ISA {

/// Rounds half to even for |x| < 2^22: the adder rounds to integers there. Vectorises without SSE4.1, unlike rintf.
static inline int32_t round_small(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return static_cast<int32_t>(bits_of(x + magic)) - static_cast<int32_t>(bits_of(magic));
}

/// Integer code of x: NaN counts as zero. The bounds are integers, so clipping first gives what clipping last would.
template <Storage S>
static inline int32_t integer_code(float scaled, float zero_point) {
  constexpr const StorageRow& row = storage_row(S);
  float y = scaled + zero_point;
  y = y != y ? zero_point : y;
  y = y < row.code_min ? row.code_min : y;
  y = y > row.bound ? row.bound : y;
  return round_small(y);
}

/// Scale of a row that has one of its own: max(min(absmax, FLT_MAX) / bound, FLT_MIN), NaN ignored.
template <Storage S>
static inline float dynamic_scale(const float* __restrict x, int64_t n) {
  constexpr float kFloatMax = 0x1.fffffep127f;
  int32_t largest = 0;  // magnitudes compare as integers, which vectorises without reassociating floats
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(x[i]) & 0x7FFFFFFFu);
    const int32_t counted = x[i] != x[i] ? 0 : magnitude;
    largest = counted > largest ? counted : largest;
  }
  float absmax = float_of(static_cast<uint32_t>(largest));
  absmax = absmax > kFloatMax ? kFloatMax : absmax;
  const float step = absmax / storage_row(S).bound;
  return step > kMinScale ? step : kMinScale;
}

/// The factor that integers are encoded with: the head's, a value a channel, or the row's own, which is stored.
template <Storage S>
static inline const float* integer_factor(const float* x, int64_t n, const RowScales& scales, float* token_scale,
                                          float* own) {
  if (storage_row(S).scales != ScaleKind::kDynamic) return scales.inverse;
  *token_scale = dynamic_scale<S>(x, n);
  *own = 1.0f / *token_scale;
  return own;
}

/// code + 2^(bits - 1) of element i.
template <Storage S>
static inline uint8_t integer_byte(const float* x, int64_t i, const float* factor, const float* zero_point) {
  constexpr const StorageRow& row = storage_row(S);
  const float by = factor[row.scales == ScaleKind::kDynamic ? 0 : i];
  return static_cast<uint8_t>(integer_code<S>(x[i] * by, row.has_zero_point ? zero_point[i] : 0.0f) +
                              (1 << (row.bits - 1)));
}

/// Codes in `out` to values, in place.
template <Storage S>
static inline void scale_integers(int64_t n, const RowScales& scales, float token_scale, float* __restrict out) {
  constexpr const StorageRow& row = storage_row(S);
  const float* __restrict scale = scales.scale;
  const float* __restrict zero_point = scales.zero_point;
  for (int64_t i = 0; i < n; ++i) {
    const float code = row.has_zero_point ? out[i] - zero_point[i] : out[i];
    out[i] = code * (row.scales == ScaleKind::kDynamic ? token_scale : scale[i]);
  }
}

/// Integers of 8 bits: byte = code + 128.
template <Storage S>
struct Int8Codec {
  static void encode(const float* __restrict x, int64_t n, char* dst, const RowScales& scales, float* token_scale) {
    uint8_t* __restrict bytes = reinterpret_cast<uint8_t*>(dst);
    float own;
    const float* __restrict factor = integer_factor<S>(x, n, scales, token_scale, &own);
    const float* __restrict zero_point = scales.zero_point;
    for (int64_t i = encode_int8_vectors<S>(x, n, bytes, factor, zero_point); i < n; ++i) {
      bytes[i] = integer_byte<S>(x, i, factor, zero_point);
    }
  }
  static void decode(const char* src, int64_t n, const RowScales& scales, float token_scale, float* __restrict out) {
    const uint8_t* __restrict bytes = reinterpret_cast<const uint8_t*>(src);
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<int32_t>(bytes[i]) - 128);
    scale_integers<S>(n, scales, token_scale, out);
  }
};

/// Integers of 4 bits: nibble = code + 8, two to a byte, low nibble = even index. n is even.
template <Storage S>
struct Int4Codec {
  static void encode(const float* __restrict x, int64_t n, char* dst, const RowScales& scales, float* token_scale) {
    uint8_t* __restrict bytes = reinterpret_cast<uint8_t*>(dst);
    float own;
    const float* __restrict factor = integer_factor<S>(x, n, scales, token_scale, &own);
    const float* __restrict zero_point = scales.zero_point;
    for (int64_t i = encode_int4_vectors<S>(x, n, bytes, factor, zero_point) / 2; i < n / 2; ++i) {
      const int low = integer_byte<S>(x, 2 * i, factor, zero_point);
      const int high = integer_byte<S>(x, 2 * i + 1, factor, zero_point);
      bytes[i] = static_cast<uint8_t>(low | (high << 4));
    }
  }
  static void decode(const char* src, int64_t n, const RowScales& scales, float token_scale, float* __restrict out) {
    const uint8_t* __restrict bytes = reinterpret_cast<const uint8_t*>(src);
    for (int64_t i = 0; i < n / 2; ++i) {
      out[2 * i] = static_cast<float>((bytes[i] & 15) - 8);
      out[2 * i + 1] = static_cast<float>((bytes[i] >> 4) - 8);
    }
    // a loop of its own: together, GCC gives up on the interleaved channels
    scale_integers<S>(n, scales, token_scale, out);
  }
};

/// float8_e4m3fn with a static scale.
struct Fp8Codec {
  static void encode(const float* __restrict x, int64_t n, char* dst, const RowScales& scales, float*) {
    uint8_t* __restrict bytes = reinterpret_cast<uint8_t*>(dst);
    const float* __restrict inverse = scales.inverse;
    const int64_t done = encode_e4m3_vectors(x, n, bytes, inverse, 1);
    for (int64_t i = done; i < n; ++i) bytes[i] = float_to_e4m3(x[i] * inverse[i]);
  }
  static void decode(const char* src, int64_t n, const RowScales& scales, float, float* __restrict out) {
    e4m3_row_to_float(reinterpret_cast<const uint8_t*>(src), n, out);
    const float* __restrict scale = scales.scale;
    for (int64_t i = 0; i < n; ++i) out[i] *= scale[i];
  }
};

/// float8_e4m3fn_zp: divides, unlike the others, by definition.
struct Fp8ZpCodec {
  static void encode(const float* __restrict x, int64_t n, char* dst, const RowScales& scales, float*) {
    uint8_t* __restrict bytes = reinterpret_cast<uint8_t*>(dst);
    const float* __restrict scale = scales.scale;
    const float* __restrict zero_point = scales.zero_point;
    const int64_t done = encode_e4m3_zp_vectors(x, n, bytes, scale, zero_point);
    for (int64_t i = done; i < n; ++i) bytes[i] = float_to_e4m3(x[i] / scale[i] + zero_point[i]);
  }
  static void decode(const char* src, int64_t n, const RowScales& scales, float, float* __restrict out) {
    e4m3_row_to_float(reinterpret_cast<const uint8_t*>(src), n, out);
    const float* __restrict scale = scales.scale;
    const float* __restrict zero_point = scales.zero_point;
    for (int64_t i = 0; i < n; ++i) out[i] = (out[i] - zero_point[i]) * scale[i];
  }
};

/// block_wise_fp8: the row's own scale.
struct BlockWiseFp8Codec {
  static void encode(const float* __restrict x, int64_t n, char* dst, const RowScales&, float* token_scale) {
    const float scale = dynamic_scale<Storage::kBlockWiseFp8>(x, n);
    const float inverse = 1.0f / scale;
    uint8_t* __restrict bytes = reinterpret_cast<uint8_t*>(dst);
    const int64_t done = encode_e4m3_vectors(x, n, bytes, &inverse, 0);
    for (int64_t i = done; i < n; ++i) bytes[i] = float_to_e4m3(x[i] * inverse);
    *token_scale = scale;
  }
  static void decode(const char* src, int64_t n, const RowScales&, float token_scale, float* __restrict out) {
    e4m3_row_to_float(reinterpret_cast<const uint8_t*>(src), n, out);
    for (int64_t i = 0; i < n; ++i) out[i] *= token_scale;
  }
};

template <typename Codec>
static void decode_rows(const char* src, int64_t row_bytes, int64_t count, int64_t n, const RowScales& scales,
                        const float* token_scale, float* out, int64_t out_stride) {
  for (int64_t i = 0; i < count; ++i) {
    const float dynamic = token_scale == nullptr ? 0.0f : token_scale[i];
    Codec::decode(src + i * row_bytes, n, scales, dynamic, out + i * out_stride);
  }
}

template <LoadRow load>
static void decode_model_rows(const char* src, int64_t row_bytes, int64_t count, int64_t n, const RowScales&,
                              const float*, float* out, int64_t out_stride) {
  for (int64_t i = 0; i < count; ++i) load(src + i * row_bytes, n, out + i * out_stride);
}

/// Rotary embedding of the first 2 * half elements.
static void rotate_row(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1;
  const int64_t partner = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step];
    const float b = x[i * step + partner];
    x[i * step] = a * cos[i] - b * sin[i];
    x[i * step + partner] = b * cos[i] + a * sin[i];
  }
}

template <typename Codec>
static void add_codec(KernelTable* table, Storage storage) {
  table->encode_row[static_cast<int>(storage)] = &Codec::encode;
  table->decode_rows[static_cast<int>(storage)] = &decode_rows<Codec>;
}

/// Fills everything of the table but the attention kernel.
static inline void add_codecs(KernelTable* table) {
  add_codec<Int8Codec<Storage::kInt8>>(table, Storage::kInt8);
  add_codec<Int8Codec<Storage::kInt8Zp>>(table, Storage::kInt8Zp);
  add_codec<Fp8Codec>(table, Storage::kFloat8E4M3);
  add_codec<Fp8ZpCodec>(table, Storage::kFloat8E4M3Zp);
  add_codec<BlockWiseFp8Codec>(table, Storage::kBlockWiseFp8);
  add_codec<Int4Codec<Storage::kInt4Zp>>(table, Storage::kInt4Zp);
  add_codec<Int8Codec<Storage::kInt8Token>>(table, Storage::kInt8Token);
  table->load_row[0] = &load_float32;
  table->load_row[1] = &load_float16;
  table->load_row[2] = &load_bfloat16;
  table->store_row[0] = &store_float32;
  table->store_row[1] = &store_float16;
  table->store_row[2] = &store_bfloat16;
  table->decode_model_rows[0] = &decode_model_rows<&load_float32>;
  table->decode_model_rows[1] = &decode_model_rows<&load_float16>;
  table->decode_model_rows[2] = &decode_model_rows<&load_bfloat16>;
  table->rotate_row = &rotate_row;
}

}  // namespace fastkv::FASTKV_ISA
