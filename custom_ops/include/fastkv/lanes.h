// How stored bytes become lanes of eight floats, in registers and without scales: what the row kernels (rows.h) are
// instantiated over.
//
// A group is kBytes of a row; it yields kVecs vectors. Lane l of vector v holds channel l * kVecs + v of the group: a
// 32-bit lane that holds several codes gives its j-th code to vector j, which needs shifts and masks but no shuffle
// across lanes. So channels come out in another order than they are stored in; queries are put into that order before
// the kernel runs and results are put back after it, once for thousands of positions.
//
// Lanes are not yet values: integer codes are fractions above 1, float8 keeps its exponent bias. Both are corrected
// outside the loops (row_tile.h), as are scales and zero points.
#pragma once

#include "fastkv/storage.h"
#include "fastkv/vec.h"

namespace fastkv::FASTKV_ISA {

struct Float32Lanes {
  static constexpr int kVecs = 1, kBytes = 32;
  static constexpr bool kHasNanCode = false;  // codes that stand for NaN, but come out as numbers
  template <int V>
  static FASTKV_INLINE F8 get(const char* group) {
    return load8(reinterpret_cast<const float*>(group));
  }
};

#ifdef __AVX2__

/// W stored bytes to a 32-bit lane.
template <int W>
static FASTKV_INLINE __m256i load_codes(const char* p) {
  if (W == 4) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if (W == 2) return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

struct BFloat16Lanes {
  static constexpr int kVecs = 2, kBytes = 32;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE F8 get(const char* group) {
    const __m256i pair = load_codes<4>(group);
    return (F8)(V == 0 ? _mm256_slli_epi32(pair, 16) : _mm256_and_si256(pair, _mm256_set1_epi32(-65536)));
  }
};

struct Float16Lanes {
  static constexpr int kVecs = 1, kBytes = 16;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE F8 get(const char* group) {
    return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group)));
  }
};

/// Unsigned codes of kBits each, W bytes of them to a 32-bit lane. Shifted to the top of a float's mantissa, under the
/// exponent of 1.0, code V and those below it in the lane make 1 + 2^-kBits * (code[V] + 2^-kBits * (code[V-1] + ...)):
/// two shifts and an or, which run beside the multiply-adds, where a mask and an integer conversion would compete with
/// them. That the lower codes come along is undone outside the loop (their share is linear); at most the 24th bit of
/// the sum is lost.
template <int kBits, int W>
struct IntegerLanes {
  static constexpr int kVecs = 8 * W / kBits, kBytes = 8 * W;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE F8 get(const char* group) {
    __m256i code = load_codes<W>(group);
    constexpr int kAbove = 32 - kBits * (V + 1);
    if (kAbove > 0) code = _mm256_slli_epi32(code, kAbove);
    return (F8)_mm256_or_si256(_mm256_srli_epi32(code, 9), _mm256_set1_epi32(0x3F800000));
  }
};

/// The same codes as the bits of a subnormal float, code * 2^-149, by a shift and a mask: exact, cheaper still, and the
/// lower codes stay away. For CPUs whose multipliers take subnormal numbers at full speed
/// (KernelTable::fast_subnormals).
template <int kBits, int W>
struct SubnormalLanes {
  static constexpr int kVecs = 8 * W / kBits, kBytes = 8 * W;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE F8 get(const char* group) {
    __m256i code = load_codes<W>(group);
    if (V > 0) code = _mm256_srli_epi32(code, kBits * V);
    if (V < kVecs - 1) code = _mm256_and_si256(code, _mm256_set1_epi32((1 << kBits) - 1));
    return (F8)code;
  }
};

/// Byte V of each lane, e4m3, times 2^-120: its exponent and mantissa at float32's place. Subnormal codes become
/// subnormal floats, which the multiplier takes as they are (the driver sees to it that no mode flushes them). The NaN
/// codes come out as 480 * 2^-120: kernels watch for them.
template <int W>
struct Float8Lanes {
  static constexpr int kVecs = W, kBytes = 8 * W;
  static constexpr bool kHasNanCode = true;
  template <int V>
  static FASTKV_INLINE F8 get(const char* group) {
    __m256i code = load_codes<W>(group);
    if (V < 3) code = _mm256_slli_epi32(code, 24 - 8 * V);
    code = _mm256_srai_epi32(code, 4);
    return (F8)_mm256_and_si256(code, _mm256_set1_epi32(static_cast<int32_t>(0x87F00000u)));
  }
  /// Adds to `seen`, byte by byte, what tells a NaN code: 2 * code is 254 for 0x7F and 0xFF only.
  static FASTKV_INLINE __m256i watch(const char* group, __m256i seen) {
    const __m256i codes = load_codes<W>(group);
    return _mm256_max_epu8(seen, _mm256_add_epi8(codes, codes));
  }
};

#endif  // __AVX2__

}  // namespace fastkv::FASTKV_ISA
