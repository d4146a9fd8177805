// How stored bytes become lanes of a vector of floats, in registers and without scales: what the row kernels (rows.h)
// are instantiated over.
//
// A group is kBytes of a row; it yields kVecs vectors. Lane l of vector v holds channel l * kVecs + v of the group
// (Float8Lanes: + code(v)): a 32-bit lane that holds several codes gives one to each vector, by shifts and masks but no
// shuffle across lanes. So channels come out in another order than they are stored in; queries are put into that order
// before the kernel runs and results are put back after it, once for thousands of positions.
//
// Lanes are not yet values: integer codes are fractions above 1, float8 keeps its exponent bias. Both are corrected
// outside the loops (row_tile.h), as are scales and zero points.
#pragma once

#include "fastkv/storage.h"
#include "fastkv/vec.h"

namespace fastkv::FASTKV_ISA {

struct Float32Lanes {
  static constexpr int kVecs = 1, kBytes = 4 * kLanes;
  static constexpr bool kHasNanCode = false;  // codes that stand for NaN, but come out as numbers
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
    return load(reinterpret_cast<const float*>(group));
  }
};

#ifdef __AVX2__

/// W stored bytes to a 32-bit lane.
template <int W>
static FASTKV_INLINE Words load_codes(const char* p) {
#ifdef __AVX512F__
  if constexpr (W == 4) return (Words)_mm512_loadu_si512(p);
  if constexpr (W == 2) return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  if constexpr (W == 4) return (Words)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (W == 2) return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#endif
}

/// Shifts towards higher bits, by as many places as N says; down if N is negative.
template <int N>
static FASTKV_INLINE Words shifted(Words x) {
  if constexpr (N > 0) return x << N;
  if constexpr (N < 0) return x >> -N;
  return x;
}

template <int W>
struct BFloat16Lanes {
  static constexpr int kVecs = W / 2, kBytes = W * kLanes;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
    const Words codes = load_codes<W>(group);
    return (Floats)(V == 0 ? codes << 16 : codes & 0xFFFF0000u);
  }
};

struct Float16Lanes {
  static constexpr int kVecs = 1, kBytes = 2 * kLanes;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group)));
#else
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group)));
#endif
  }
};

/// Unsigned codes of kBits each, W bytes of them to a 32-bit lane. Shifted to the top of a float's mantissa, under the
/// exponent of 1.0, code V and those below it in the lane make 1 + 2^-kBits * (code[V] + 2^-kBits * (code[V-1] + ...)):
/// two shifts and an or, which run beside the multiply-adds, where a mask and an integer conversion would compete with
/// them. That the lower codes come along is undone outside the loop (their share is linear); at most the 24th bit of
/// the sum is lost.
template <int kBits, int W>
struct CarryLanes {
  static constexpr int kVecs = 8 * W / kBits, kBytes = W * kLanes;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
    return (Floats)(shifted<32 - kBits*(V + 1)>(load_codes<W>(group)) >> 9 | 0x3F800000u);
  }
};

/// The same without the lower codes, 1 + 2^-kBits * code: for AVX-512, which has mask and or in one instruction.
template <int kBits, int W>
struct MantissaLanes {
  static constexpr int kVecs = 8 * W / kBits, kBytes = W * kLanes;
  static constexpr bool kHasNanCode = false;
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
    constexpr uint32_t kMask = ((1u << kBits) - 1) << (23 - kBits);
    return (Floats)((shifted<23 - kBits*(V + 1)>(load_codes<W>(group)) & kMask) | 0x3F800000u);
  }
};

/// The same codes as bits of a tiny float, code * 2^(unit(V) - 149): exact, cheaper still, and the lower codes stay
/// away. Floats whose exponent field is 0 or 1 are their bits times 2^-149, so codes in the lower 24 bits stay where
/// they are, behind a mask. For CPUs whose multiply-adds take subnormal numbers at full speed
/// (KernelTable::fast_subnormals).
template <int kBits, int W>
struct SubnormalLanes {
  static constexpr int kVecs = 8 * W / kBits, kBytes = W * kLanes;
  static constexpr bool kHasNanCode = false;
  static constexpr int unit(int v) { return kBits * (v + 1) <= 24 ? kBits * v : 0; }
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
    const Words codes = shifted<unit(V) - kBits * V>(load_codes<W>(group));
    return (Floats)(kBits * (V + 1) == 32 ? codes : codes & (((1u << kBits) - 1) << unit(V)));
  }
};

/// Byte code(V) of each lane, e4m3, times 2^-120: its exponent and mantissa at float32's place. Subnormal codes become
/// subnormal floats, which the multiplier takes as they are (the driver sees to it that no mode flushes them). The NaN
/// codes come out as 480 * 2^-120: kernels watch for them.
template <int W>
struct Float8Lanes {
  static constexpr int kVecs = W, kBytes = W * kLanes;
  static constexpr bool kHasNanCode = true;
  /// Neighbouring vectors are the lower and the upper of two bytes that are brought to their place at once.
  static constexpr int code(int v) { return W == 4 ? v % 2 * 2 + v / 2 : v; }
  template <int V>
  static FASTKV_INLINE Floats get(const char* group) {
    // each 16 bits: a byte in the upper half, then down by four, the sign with it
    const Shorts pairs = ((Shorts)load_codes<W>(group) << (code(V) % 2 == 0 ? 8 : 0)) >> 4;
    return (Floats)((code(V) < 2 ? (Words)pairs << 16 : (Words)pairs) & 0x87F00000u);
  }
};

#endif  // __AVX2__

/// Tells whether any NaN code of float8 passed.
template <bool kWatches>
struct NanWatch {
  template <typename L>
  FASTKV_INLINE void look(const char*) {}
  FASTKV_INLINE bool seen() const { return false; }
};

#ifdef __AVX2__
/// Keeps the largest 2 * code of each byte: it is 254 for the NaN codes 0x7F and 0xFF only.
template <>
struct NanWatch<true> {
  Words bytes = {};
  template <typename L>
  FASTKV_INLINE void look(const char* group) {
    const Words codes = load_codes<L::kBytes / kLanes>(group);
#ifdef __AVX512F__
    bytes = (Words)_mm512_max_epu8((__m512i)bytes, _mm512_add_epi8((__m512i)codes, (__m512i)codes));
#else
    bytes = (Words)_mm256_max_epu8((__m256i)bytes, _mm256_add_epi8((__m256i)codes, (__m256i)codes));
#endif
  }
  FASTKV_INLINE bool seen() const {
#ifdef __AVX512F__
    return _mm512_cmpeq_epi8_mask((__m512i)bytes, _mm512_set1_epi8(static_cast<char>(254))) != 0;
#else
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8((__m256i)bytes, _mm256_set1_epi8(static_cast<char>(254)))) != 0;
#endif
  }
};
#endif  // __AVX2__

}  // namespace fastkv::FASTKV_ISA
