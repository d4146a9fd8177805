// Eight floats to eight codes at once, for sources compiled for AVX2: the same arithmetic as the scalar functions of
// floats.h and codec.h, bit for bit. Each function encodes whole vectors and returns how many elements it did; the
// scalar loop does the rest. Elsewhere they do nothing.
//
// Rounding to integers relies on the default rounding mode, half to even, as the scalar code does.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastkv/storage.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace fastkv::FASTKV_ISA {

#ifdef __AVX2__

/// Low bytes of eight 32-bit numbers below 256.
static FASTKV_INLINE __m128i low_bytes(__m256i x) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  return _mm_packus_epi16(words, words);
}

/// Integer codes, bounded; NaN counts as zero. As integer_code() in codec.h.
template <Storage S>
static FASTKV_INLINE __m256i integer_codes(__m256 scaled, __m256 zero_point) {
  constexpr const StorageRow& row = storage_row(S);
  __m256 y = row.has_zero_point ? _mm256_add_ps(scaled, zero_point) : scaled;
  y = _mm256_blendv_ps(y, zero_point, _mm256_cmp_ps(y, y, _CMP_UNORD_Q));
  y = _mm256_min_ps(_mm256_max_ps(y, _mm256_set1_ps(row.code_min)), _mm256_set1_ps(row.bound));
  return _mm256_cvtps_epi32(y);
}

/// A factor a channel, or one for all of the row where scales are dynamic.
template <Storage S>
static FASTKV_INLINE __m256 load_factor(const float* factor, int64_t i) {
  return storage_row(S).scales == ScaleKind::kDynamic ? _mm256_set1_ps(*factor) : _mm256_loadu_ps(factor + i);
}

template <Storage S>
static FASTKV_INLINE int64_t encode_int8_vectors(const float* x, int64_t n, uint8_t* bytes, const float* inverse,
                                                 const float* zero_point) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), load_factor<S>(inverse, i));
    const __m256 zero = storage_row(S).has_zero_point ? _mm256_loadu_ps(zero_point + i) : _mm256_setzero_ps();
    const __m256i codes = _mm256_add_epi32(integer_codes<S>(scaled, zero), _mm256_set1_epi32(128));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes + i), low_bytes(codes));
  }
  return i;
}

template <Storage S>
static FASTKV_INLINE int64_t encode_int4_vectors(const float* x, int64_t n, uint8_t* bytes, const float* inverse,
                                                 const float* zero_point) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), load_factor<S>(inverse, i));
    const __m256 zero = storage_row(S).has_zero_point ? _mm256_loadu_ps(zero_point + i) : _mm256_setzero_ps();
    __m256i codes = integer_codes<S>(scaled, zero);
    codes = _mm256_add_epi32(codes, _mm256_set1_epi32(8));
    // the odd code of each pair moves down from the upper half of its 64 bits, to stand above the even one
    const __m256i pairs = _mm256_or_si256(codes, _mm256_srli_epi64(codes, 28));
    const __m256i low = _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    const uint32_t packed =
        static_cast<uint32_t>(_mm_cvtsi128_si32(low_bytes(_mm256_and_si256(low, _mm256_set1_epi32(255)))));
    std::memcpy(bytes + i / 2, &packed, 4);
  }
  return i;
}

/// As float_to_e4m3() in floats.h. The magnitude is rounded in the adder, beside a number so large that its last bit is
/// worth the code's: 2^20 times the power of two below the magnitude, but no less than the subnormals' step asks for.
static FASTKV_INLINE __m256i e4m3_codes(__m256 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 smallest = _mm256_set1_ps(0x1p-6f);  // normal number
  const __m256 magnitude = _mm256_min_ps(_mm256_andnot_ps(sign, x), _mm256_set1_ps(448.0f));
  const __m256 power =
      _mm256_max_ps(_mm256_and_ps(magnitude, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000))), smallest);
  const __m256 large = _mm256_mul_ps(power, _mm256_set1_ps(0x1p20f));
  const __m256 rounded = _mm256_sub_ps(_mm256_add_ps(magnitude, large), large);
  // a subnormal code is the mantissa of 2^-6 + its value, which has the exponent code of the smallest normal number
  const __m256 is_small = _mm256_cmp_ps(rounded, smallest, _CMP_LT_OQ);
  const __m256i bits = _mm256_castps_si256(_mm256_add_ps(rounded, _mm256_and_ps(is_small, smallest)));
  const __m256i bias = _mm256_add_epi32(_mm256_set1_epi32(120 << 3),
                                        _mm256_and_si256(_mm256_castps_si256(is_small), _mm256_set1_epi32(8)));
  __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(bits, 20), bias);
  code = _mm256_or_si256(code, _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(x, sign)), 24));
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(code), _mm256_castsi256_ps(_mm256_set1_epi32(0x7F)),
                                              _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

static FASTKV_INLINE void store_e4m3_vector(__m256 scaled, uint8_t* bytes) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes), low_bytes(e4m3_codes(scaled)));
}

/// x * factor: a factor a channel (stride 1), or one for all (stride 0).
static FASTKV_INLINE int64_t encode_e4m3_vectors(const float* x, int64_t n, uint8_t* bytes, const float* factor,
                                                 int64_t stride) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 by = stride == 0 ? _mm256_set1_ps(*factor) : _mm256_loadu_ps(factor + i);
    store_e4m3_vector(_mm256_mul_ps(_mm256_loadu_ps(x + i), by), bytes + i);
  }
  return i;
}

/// x / scale + zero_point.
static FASTKV_INLINE int64_t encode_e4m3_zp_vectors(const float* x, int64_t n, uint8_t* bytes, const float* scale,
                                                    const float* zero_point) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 scaled = _mm256_div_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(scale + i));
    store_e4m3_vector(_mm256_add_ps(scaled, _mm256_loadu_ps(zero_point + i)), bytes + i);
  }
  return i;
}

/// As float_to_bf16() in floats.h.
static FASTKV_INLINE int64_t store_bf16_vectors(const float* x, int64_t n, uint16_t* h) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 value = _mm256_loadu_ps(x + i);
    const __m256i u = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x00400000));
    const __m256i kept = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet),
                                                              _mm256_cmp_ps(value, value, _CMP_UNORD_Q)));
    const __m256i high = _mm256_srli_epi32(kept, 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(h + i),
                     _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
  }
  return i;
}

#else  // no AVX2: nothing is done here

template <Storage S>
static FASTKV_INLINE int64_t encode_int8_vectors(const float*, int64_t, uint8_t*, const float*, const float*) {
  return 0;
}
template <Storage S>
static FASTKV_INLINE int64_t encode_int4_vectors(const float*, int64_t, uint8_t*, const float*, const float*) {
  return 0;
}
static FASTKV_INLINE int64_t encode_e4m3_vectors(const float*, int64_t, uint8_t*, const float*, int64_t) { return 0; }
static FASTKV_INLINE int64_t encode_e4m3_zp_vectors(const float*, int64_t, uint8_t*, const float*, const float*) {
  return 0;
}
static FASTKV_INLINE int64_t store_bf16_vectors(const float*, int64_t, uint16_t*) { return 0; }

#endif

}  // namespace fastkv::FASTKV_ISA
