// Codecs: how rows of the model become stored codes, and codes float32 values. One pair of functions, which read in
// storage.h what a type is; kernels only see them through kernel_table.h. With AVX2 they work in steps of
// code_vectors.h, and element by element where a row is too short for one, or a step finds a NaN.
//
// Compiled once an instruction set with floating-point contraction off: x * inverse + zero_point must round twice, as
// NumPy does, or codes would differ in the last bit between CPUs. fastkv/ops/reference.py holds the same arithmetic.
//
// Integer types have no NaN: a NaN is encoded as 0.0 would be. float8 saturates at its bound and keeps NaN.
#pragma once

#include "fastkv/code_vectors.h"
#include "fastkv/floats.h"
#include "fastkv/kernel_table.h"

namespace fastkv::FASTKV_ISA {

// Elements of a step.
#ifdef __AVX2__
constexpr int64_t kEncodeStep = 32;
constexpr int64_t kDecodeStep = 16;
#else
constexpr int64_t kEncodeStep = kMaxRowDim;
constexpr int64_t kDecodeStep = kMaxRowDim;
#endif

template <Storage S>
inline constexpr bool kIsFloat8 = storage_row(S).bound == 448.0f;
template <Storage S>
inline constexpr bool kIsDynamic = storage_row(S).scales == ScaleKind::kDynamic;
template <Storage S>
inline constexpr bool kDivides = S == Storage::kFloat8E4M3Zp;  // by the scale, unlike the others: so it is defined

/// Rounds half to even for |x| < 2^22: the adder rounds to integers there. Vectorises without SSE4.1, unlike rintf.
static inline int32_t round_small(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return static_cast<int32_t>(bits_of(x + magic)) - static_cast<int32_t>(bits_of(magic));
}

/// Integer code of x: NaN counts as zero. The bounds are integers, so clipping first gives what clipping last would.
template <Storage S>
static inline int32_t integer_code(float x, float zero_point) {
  constexpr const StorageRow& row = storage_row(S);
  float y = x != x ? zero_point : x;
  y = y < row.code_min ? row.code_min : y;
  y = y > row.bound ? row.bound : y;
  return round_small(y);
}

#ifdef __AVX2__
#define FASTKV_APART __attribute__((noinline))  // from the loops over vectors, which want all registers
#else
#define FASTKV_APART
#endif

/// Elements [begin, end) of a row, one by one. Of 4 bits two to a byte, low nibble = even index; both ends are even.
template <Storage S, ModelDtype D>
FASTKV_APART static void encode_some(const char* src, int64_t begin, int64_t end, const RowScales& by, uint8_t* dst) {
  constexpr const StorageRow& row = storage_row(S);
  const float* __restrict factor = kDivides<S> ? by.scale : by.inverse;
  const float* __restrict zero_point = by.zero_point;
  uint8_t* __restrict bytes = dst;
  const auto code = [&](int64_t i) -> uint32_t {
    const float f = factor[kIsDynamic<S> ? 0 : i], zero = row.has_zero_point ? zero_point[i] : 0.0f;
    float x = load_one<D>(src, i);
    x = kDivides<S> ? x / f : x * f;
    if constexpr (row.has_zero_point) x += zero;
    if constexpr (kIsFloat8<S>) return float_to_e4m3(x);
    return static_cast<uint32_t>(integer_code<S>(x, zero) + (1 << (row.bits - 1)));
  };
  if constexpr (row.bits == 8) {
    for (int64_t i = begin; i < end; ++i) bytes[i] = static_cast<uint8_t>(code(i));
  } else {
    for (int64_t i = begin; i < end; i += 2) bytes[i / 2] = static_cast<uint8_t>(code(i) | (code(i + 1) << 4));
  }
}

/// As encode_some() backwards.
template <Storage S>
FASTKV_APART static void decode_some(const uint8_t* src, int64_t begin, int64_t end, const RowScales& by, float* to) {
  constexpr const StorageRow& row = storage_row(S);
  const uint8_t* __restrict bytes = src;
  const float* __restrict scale = by.scale;
  const float* __restrict zero_point = by.zero_point;
  float* __restrict out = to;
  for (int64_t i = begin; i < end; ++i) {
    float code;
    if constexpr (kIsFloat8<S>) {
      code = e4m3_to_float(bytes[i]);
    } else if constexpr (row.bits == 8) {
      code = static_cast<float>(static_cast<int32_t>(bytes[i]) - 128);
    } else {
      code = static_cast<float>(((bytes[i / 2] >> (i % 2 * 4)) & 15) - 8);
    }
    if constexpr (row.has_zero_point) code -= zero_point[i];
    out[i] = code * scale[kIsDynamic<S> ? 0 : i];
  }
}

/// Largest magnitude of a row as the bits of a float, NaN ignored. Magnitudes compare as integers, which vectorises
/// without reassociating floats.
template <ModelDtype D>
static inline int32_t largest_magnitude(const char* src, int64_t n) {
  constexpr int32_t kInfinity = 0x7F800000;
#ifdef __AVX2__
  if (n >= 8) {
    const int32_t largest = largest_of_vectors<D>(src, n);
    if (largest <= kInfinity) return largest;
  }
#endif
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(load_one<D>(src, i)) & 0x7FFFFFFFu);
    const int32_t counted = magnitude > kInfinity ? 0 : magnitude;
    largest = counted > largest ? counted : largest;
  }
  return largest;
}

/// Scale of a row that has one of its own: max(min(absmax, FLT_MAX) / bound, FLT_MIN).
template <Storage S, ModelDtype D>
static inline float dynamic_scale(const char* src, int64_t n) {
  constexpr float kFloatMax = 0x1.fffffep127f;
  const float absmax = smaller(float_of(static_cast<uint32_t>(largest_magnitude<D>(src, n))), kFloatMax);
  return larger(absmax / storage_row(S).bound, kMinScale);
}

#ifdef __AVX2__

/// A value a channel, or one for all of the row where scales are dynamic.
template <Storage S>
static FASTKV_INLINE __m256 load_factor(const float* factor, int64_t i) {
  return kIsDynamic<S> ? _mm256_set1_ps(*factor) : _mm256_loadu_ps(factor + i);
}

/// A row from `begin` on, in steps; the last one may do some elements again. Returns where it ended: at n, or where a
/// step could not be done.
template <Storage S, ModelDtype D>
static FASTKV_INLINE int64_t encode_vectors(const char* src, int64_t begin, int64_t n, const RowScales& by,
                                            uint8_t* bytes, int64_t fetch_src, int64_t fetch_dst) {
  constexpr const StorageRow& row = storage_row(S);
  const float* const factor = kDivides<S> ? by.scale : by.inverse;
  const float* const zero_point = by.zero_point;
  if (n < kEncodeStep) return begin;
  for (; begin < n; begin += kEncodeStep) {
    const int64_t at = smaller(begin, n - kEncodeStep);
    const char* const from = src + at * dtype_bytes(D);
    for (int64_t line = 0; line < kEncodeStep * dtype_bytes(D); line += 64) __builtin_prefetch(from + fetch_src + line);
    __builtin_prefetch(bytes + at * row.bits / 8 + fetch_dst, 1);
    __m256 x[4];
    for (int j = 0; j < 4; ++j) {
      const int64_t i = at + 8 * j;
      const __m256 f = load_factor<S>(factor, i);
      x[j] = kDivides<S> ? _mm256_div_ps(load_eight<D>(src, i), f) : _mm256_mul_ps(load_eight<D>(src, i), f);
      if constexpr (row.has_zero_point) x[j] = _mm256_add_ps(x[j], _mm256_loadu_ps(zero_point + i));
    }
    __m256i codes;
    if (!(kIsFloat8<S> ? e4m3_bytes(x, &codes) : integer_bytes<S>(x, &codes))) break;
    store_codes<S>(codes, bytes + at * row.bits / 8);
  }
  return smaller(begin, n);
}

/// Likewise.
template <Storage S, bool kStream>
static FASTKV_INLINE int64_t decode_vectors(const uint8_t* bytes, int64_t begin, int64_t n, const RowScales& by,
                                            float* out) {
  const float* const scale = by.scale;
  const float* const zero_point = by.zero_point;
  if (n < kDecodeStep) return begin;
  for (; begin < n; begin += kDecodeStep) {
    const int64_t at = smaller(begin, n - kDecodeStep);
    __m256 x[2];
    if (!load_codes<S>(bytes, at, x)) break;
    for (int j = 0; j < 2; ++j) {
      const int64_t i = at + 8 * j;
      if constexpr (storage_row(S).has_zero_point) x[j] = _mm256_sub_ps(x[j], _mm256_loadu_ps(zero_point + i));
      store_eight<kStream>(out + i, _mm256_mul_ps(x[j], load_factor<S>(scale, i)));
    }
  }
  return smaller(begin, n);
}

#else

template <Storage S, ModelDtype D>
static int64_t encode_vectors(const char*, int64_t begin, int64_t, const RowScales&, uint8_t*, int64_t, int64_t) {
  return begin;
}
template <Storage S, bool kStream>
static int64_t decode_vectors(const uint8_t*, int64_t begin, int64_t, const RowScales&, float*) {
  return begin;
}

#endif

/// See EncodeRows. Dynamic scales come first: finding one waits for results, which the next row's need not.
template <Storage S, ModelDtype D>
static void encode_rows(const char* src, int64_t src_stride, int64_t count, int64_t n, char* dst,
                        const RowScales& scales, float* token_scale, int64_t fetch_src, int64_t fetch_dst) {
  const int64_t row_bytes = stored_row_bytes(S, D, n);
  if constexpr (kIsDynamic<S>) {
    for (int64_t row = 0; row < count; ++row) token_scale[row] = dynamic_scale<S, D>(src + row * src_stride, n);
  }
  RowScales by = scales;
  float inverse;
  for (int64_t row = 0; row < count; ++row, src += src_stride, dst += row_bytes) {
    uint8_t* to = reinterpret_cast<uint8_t*>(dst);
    if constexpr (kIsDynamic<S>) {
      inverse = 1.0f / token_scale[row];
      by.inverse = &inverse;
    }
    int64_t done = 0;
    while ((done = encode_vectors<S, D>(src, done, n, by, to, fetch_src, fetch_dst)) < n) {
      const int64_t end = smaller(done + kEncodeStep, n);
      encode_some<S, D>(src, done, end, by, to);
      done = end;
    }
  }
}

/// See DecodeRows.
template <Storage S, bool kStream>
static void decode_rows(const char* src, int64_t row_bytes, int64_t count, int64_t n, const RowScales& scales,
                        const float* token_scale, float* out, int64_t out_stride) {
  RowScales by = scales;
  for (int64_t row = 0; row < count; ++row, src += row_bytes, out += out_stride) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(src);
    if constexpr (kIsDynamic<S>) by.scale = token_scale + row;
    int64_t done = 0;
    while ((done = decode_vectors<S, kStream>(bytes, done, n, by, out)) < n) {
      const int64_t end = smaller(done + kDecodeStep, n);
      decode_some<S>(bytes, done, end, by, out);
      done = end;
    }
  }
}

template <ModelDtype D, bool kStream>
static void decode_model_rows(const char* src, int64_t row_bytes, int64_t count, int64_t n, const RowScales&,
                              const float*, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < count; ++row, src += row_bytes, out += out_stride) {
    int64_t i = 0;
#ifdef __AVX2__
    for (; i + 8 <= n; i += 8) store_eight<kStream>(out + i, load_eight<D>(src, i));
#endif
    for (; i < n; ++i) out[i] = load_one<D>(src, i);
  }
}

/// Rotary embedding of the first 2 * half elements. Two loops: with a distance known only at run time, nothing
/// vectorises.
static void rotate_row(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  float* __restrict first = x;
  float* __restrict second = x + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

template <Storage S>
static void add_codec(KernelTable* table) {
  constexpr int at = static_cast<int>(S);
  table->encode_rows[at][0] = &encode_rows<S, ModelDtype::kFloat32>;
  table->encode_rows[at][1] = &encode_rows<S, ModelDtype::kFloat16>;
  table->encode_rows[at][2] = &encode_rows<S, ModelDtype::kBFloat16>;
  table->decode_rows[0][at] = &decode_rows<S, false>;
  table->decode_rows[1][at] = &decode_rows<S, true>;
}

template <ModelDtype D>
static void add_model_dtype(KernelTable* table, LoadRow load, StoreRow store) {
  constexpr int at = static_cast<int>(D);
  table->load_row[at] = load;
  table->store_row[at] = store;
  table->decode_model_rows[0][at] = &decode_model_rows<D, false>;
  table->decode_model_rows[1][at] = &decode_model_rows<D, true>;
}

/// Fills everything of the table but the attention kernel.
static inline void add_codecs(KernelTable* table) {
  add_codec<Storage::kInt8>(table);
  add_codec<Storage::kInt8Zp>(table);
  add_codec<Storage::kFloat8E4M3>(table);
  add_codec<Storage::kFloat8E4M3Zp>(table);
  add_codec<Storage::kBlockWiseFp8>(table);
  add_codec<Storage::kInt4Zp>(table);
  add_codec<Storage::kInt8Token>(table);
  add_model_dtype<ModelDtype::kFloat32>(table, &load_float32, &store_float32);
  add_model_dtype<ModelDtype::kFloat16>(table, &load_float16, &store_float16);
  add_model_dtype<ModelDtype::kBFloat16>(table, &load_bfloat16, &store_bfloat16);
  table->rotate_row = &rotate_row;
}

}  // namespace fastkv::FASTKV_ISA
