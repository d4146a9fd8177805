// Steps of codecs on vectors, for sources compiled for AVX2: the arithmetic of the scalar functions in floats.h and
// codec.h, bit for bit. Encoders take 32 elements a step, so that packing to bytes costs one instruction in ten;
// decoders take 16. A step that finds a NaN (or an integer code far below the range) does nothing and returns false:
// codec.h then does those elements one by one.
//
// Rounding to integers relies on the default rounding mode, half to even, as the scalar code does.
#pragma once

#include <cstdint>

#include "fastkv/storage.h"

#ifdef __AVX2__
#include <immintrin.h>

namespace fastkv::FASTKV_ISA {

/// Eight elements of a row of the model, as floats.
template <ModelDtype D>
static FASTKV_INLINE __m256 load_eight(const char* row, int64_t i) {
  if constexpr (D == ModelDtype::kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(row) + i);
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
  if constexpr (D == ModelDtype::kFloat16) return _mm256_cvtph_ps(halves);
  // each half to the top of its 32 bits, zeros below: one shuffle, where widening and shifting are two
  constexpr char z = -1;
  const __m256i to_top = _mm256_setr_epi8(z, z, 0, 1, z, z, 2, 3, z, z, 4, 5, z, z, 6, 7,  //
                                          z, z, 8, 9, z, z, 10, 11, z, z, 12, 13, z, z, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(halves), to_top));
}

static FASTKV_INLINE __m256 magnitude(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

/// Largest magnitude of n >= 8 elements, as bits; more than infinity's if there is a NaN.
template <ModelDtype D>
static FASTKV_INLINE int32_t largest_of_vectors(const char* row, int64_t n) {
  __m256i largest = _mm256_castps_si256(magnitude(load_eight<D>(row, n - 8)));
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    largest = _mm256_max_epi32(largest, _mm256_castps_si256(magnitude(load_eight<D>(row, i))));
  }
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

/// Bytes that packing four vectors left in the order of its 128-bit lanes.
static FASTKV_INLINE __m256i in_order(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/// 32 integer codes as bytes, code + 2^(bits - 1). As integer_code() in codec.h; what lies below the range saturates in
/// packing.
template <Storage S>
static FASTKV_INLINE bool integer_bytes(const __m256* x, __m256i* bytes) {
  constexpr const StorageRow& row = storage_row(S);
  __m256i code[4];
  for (int j = 0; j < 4; ++j) {
    code[j] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(row.bound), x[j]));  // this order keeps a NaN
  }
  const __m256i low = _mm256_packs_epi32(code[0], code[1]), high = _mm256_packs_epi32(code[2], code[3]);
  const __m256i lowest = _mm256_set1_epi16(INT16_MIN);  // a NaN's code, too
  if (_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_min_epi16(low, high), lowest)) != 0) return false;
  const __m256i clipped =
      _mm256_max_epi8(_mm256_packs_epi16(low, high), _mm256_set1_epi8(static_cast<char>(row.code_min)));
  *bytes = in_order(_mm256_add_epi8(clipped, _mm256_set1_epi8(static_cast<char>(1 << (row.bits - 1)))));
  return true;
}

/// 32 codes of float8. As float_to_e4m3() in floats.h. The magnitude is rounded in the adder, beside a number 2^20
/// times the power of two below it (the smallest normal number's for subnormals). The sum's lower half is then the
/// mantissa with its leading one, and its upper half the exponent, four bits higher than in the code: 16 times one and
/// the other together are 16 codes and a constant.
static FASTKV_INLINE bool e4m3_bytes(const __m256* x, __m256i* bytes) {
  const __m256 exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000));
  const __m256 smallest = _mm256_set1_ps(0x1p-6f);  // normal number
  __m256i code[4];
  for (int j = 0; j < 4; ++j) {
    const __m256 power = _mm256_max_ps(_mm256_and_ps(x[j], exponent), smallest);
    const __m256 sum = _mm256_fmadd_ps(power, _mm256_set1_ps(0x1p20f), magnitude(x[j]));
    code[j] = _mm256_madd_epi16(_mm256_castps_si256(sum), _mm256_set1_epi32((1 << 16) | 16));
  }
  const __m256 nan01 = _mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q), nan23 = _mm256_cmp_ps(x[2], x[3], _CMP_UNORD_Q);
  if (_mm256_movemask_ps(_mm256_or_ps(nan01, nan23)) != 0) return false;
  const __m256i constant = _mm256_set1_epi16((127 - 6 + 20) << 7), largest = _mm256_set1_epi16(0x7E << 4);
  __m256i word[2], sign[2];
  for (int j = 0; j < 2; ++j) {
    word[j] = _mm256_sub_epi16(_mm256_packs_epi32(code[2 * j], code[2 * j + 1]), constant);
    word[j] = _mm256_srli_epi16(_mm256_min_epi16(word[j], largest), 4);  // infinity is larger, too
    sign[j] = _mm256_packs_epi32(_mm256_castps_si256(x[2 * j]), _mm256_castps_si256(x[2 * j + 1]));
  }
  const __m256i signs = _mm256_and_si256(_mm256_packs_epi16(sign[0], sign[1]), _mm256_set1_epi8(-128));
  *bytes = in_order(_mm256_or_si256(_mm256_packus_epi16(word[0], word[1]), signs));
  return true;
}

/// Stores 32 codes, one or half a byte each.
template <Storage S>
static FASTKV_INLINE void store_codes(__m256i bytes, uint8_t* dst) {
  if constexpr (storage_row(S).bits == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), bytes);
  } else {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));  // even + 16 * odd
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst),
                     _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
}

/// Sixteen codes as floats, before the zero point and the scale.
template <Storage S>
static FASTKV_INLINE bool load_codes(const uint8_t* bytes, int64_t i, __m256* x) {
  if constexpr (storage_row(S).bits == 4) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int j = 0; j < 2; ++j) {
      const __m256i eight = _mm256_broadcastd_epi32(_mm_loadu_si32(bytes + i / 2 + 4 * j));
      const __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi32(eight, shifts), _mm256_set1_epi32(15));
      x[j] = _mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8)));
    }
  } else if constexpr (storage_row(S).bound == 127.0f) {
    for (int j = 0; j < 2; ++j) {
      const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + i + 8 * j)));
      x[j] = _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(128)));
    }
  } else {
    // the halves of F16C have e4m3's layout with a wider exponent: moved there, a code is its value / 256
    const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_slli_epi16(half, 1), _mm256_set1_epi16(0x7F00));
    if (_mm256_movemask_epi8(nan) != 0) return false;
    x[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_set1_ps(256.0f));
    x[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), _mm256_set1_ps(256.0f));
  }
  return true;
}

/// To memory past the caches, where `out` is 32-byte aligned.
template <bool kStream>
static FASTKV_INLINE void store_eight(float* out, __m256 x) {
  if constexpr (kStream) {
    _mm256_stream_ps(out, x);
  } else {
    _mm256_storeu_ps(out, x);
  }
}

/// Sixteen floats to bfloat16, as float_to_bf16() in floats.h.
static FASTKV_INLINE bool store_bf16_sixteen(const float* x, uint16_t* h) {
  const __m256 value[2] = {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
  if (_mm256_movemask_ps(_mm256_cmp_ps(value[0], value[1], _CMP_UNORD_Q)) != 0) return false;
  __m256i half[2];
  for (int j = 0; j < 2; ++j) {
    const __m256i u = _mm256_castps_si256(value[j]);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    half[j] = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  }
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half[0], half[1]), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(h), packed);
  return true;
}

}  // namespace fastkv::FASTKV_ISA

#endif
