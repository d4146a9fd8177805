// A vector of floats as one value, by GCC's vector extension: eight lanes, AVX where a source is compiled for it and
// pairs of SSE registers elsewhere; sixteen lanes where a source is compiled for AVX-512. Plus the few things that the
// attention kernels need of them. Kernels are written over kLanes: nothing else here or there knows the count.
#pragma once

#include <cstdint>
#include <utility>

#include "fastkv/storage.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace fastkv::FASTKV_ISA {

#ifdef __AVX512F__
inline constexpr int kLanes = 16;
#else
inline constexpr int kLanes = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes), may_alias));
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes), may_alias));
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), may_alias, aligned(4)));

static FASTKV_INLINE Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }
static FASTKV_INLINE void store(float* p, Floats x) { *reinterpret_cast<UnalignedFloats*>(p) = x; }
static FASTKV_INLINE Floats splat(float x) { return x - Floats{}; }  // x + 0 would lose the sign of -0
static FASTKV_INLINE constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static FASTKV_INLINE float minus_infinity() { return -__builtin_inff(); }

/// sum += x * y. As text where there is an instruction for it: GCC 12 copies sums from register to register, and to the
/// stack, around what it contracts itself.
static FASTKV_INLINE void add_product(Floats& sum, Floats x, Floats y) {
#ifdef __FMA__
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
#else
  sum += x * y;
#endif
}

/// x where the mask's lanes are all ones, else y.
static FASTKV_INLINE Floats select(Ints mask, Floats x, Floats y) {
  return (Floats)(((Ints)x & mask) | ((Ints)y & ~mask));
}

/// x > y ? x : y in each lane: y where either is NaN.
static FASTKV_INLINE Floats max_each(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return select(x > y, x, y);
#endif
}

template <typename Index, int... L>
static FASTKV_INLINE Ints lane_indices(Index index, std::integer_sequence<int, L...>) {
  return Ints{index(L)...};
}

/// Lane l of the result is lane index(l) of x, or, from kLanes on, of y. Indices are constants once inlined.
template <typename V, typename Index>
static FASTKV_INLINE V permute(V x, V y, Index index) {
  return __builtin_shuffle(x, y, lane_indices(index, std::make_integer_sequence<int, kLanes>{}));
}
template <typename Index>
static FASTKV_INLINE Floats permute(Floats x, Index index) {
  return __builtin_shuffle(x, lane_indices(index, std::make_integer_sequence<int, kLanes>{}));
}

// The shuffles of transpositions. A quarter is four lanes, what 128-bit instructions work on; within each of them ...
/// ... the lower (P = 0) or upper (P = 2) two lanes of x and y, taken in turns.
template <int P, typename V>
static FASTKV_INLINE V interleave(V x, V y) {
  return permute(x, y, [](int l) { return l / 4 * 4 + l % 4 / 2 + P + l % 2 * kLanes; });
}
/// ... the lower or upper two lanes of x, then those of y.
template <int P, typename V>
static FASTKV_INLINE V pairs_of(V x, V y) {
  return permute(x, y, [](int l) { return l / 4 * 4 + l % 2 + P + l % 4 / 2 * kLanes; });
}
/// Every other quarter of x, then of y: the even ones (P = 0) or the odd ones (P = 1).
template <int P, typename V>
static FASTKV_INLINE V quarters_of(V x, V y) {
  return permute(x, y, [](int l) { return (l / 4 * 2 + P) * 4 + l % 4; });
}

/// Lane i of the result is the sum over x[i]'s lanes.
template <typename V>
static FASTKV_INLINE V sum_each(const V* x) {
  V pairs[kLanes / 2], sums[kLanes / 4];
  for (int i = 0; i < kLanes / 2; ++i) {
    pairs[i] = interleave<0>(x[2 * i], x[2 * i + 1]) + interleave<2>(x[2 * i], x[2 * i + 1]);
  }
  for (int i = 0; i < kLanes / 4; ++i) {
    sums[i] = pairs_of<0>(pairs[2 * i], pairs[2 * i + 1]) + pairs_of<2>(pairs[2 * i], pairs[2 * i + 1]);
  }
  for (int left = kLanes / 8; left > 0; left /= 2) {
    for (int i = 0; i < left; ++i) {
      sums[i] = quarters_of<0>(sums[2 * i], sums[2 * i + 1]) + quarters_of<1>(sums[2 * i], sums[2 * i + 1]);
    }
  }
  return sums[0];
}

#if defined(__AVX__) && !defined(__AVX512F__)
typedef float FourFloats __attribute__((vector_size(16), may_alias));
typedef int32_t FourInts __attribute__((vector_size(16), may_alias));

/// sums[i / 4][i % 4] = the sum over x[i]'s lanes. For halves of vectors that were added up: what is left then takes
/// 128-bit instructions, half the work where 256 bits are two operations.
template <typename V>
static FASTKV_INLINE void sum_each_four(const V (&x)[kLanes], V (&sums)[kLanes / 4]) {
  V pairs[kLanes / 2];
  for (int i = 0; i < kLanes / 2; ++i) {
    const V a = x[2 * i], b = x[2 * i + 1];
    pairs[i] = __builtin_shuffle(a, b, FourInts{0, 4, 1, 5}) + __builtin_shuffle(a, b, FourInts{2, 6, 3, 7});
  }
  for (int i = 0; i < kLanes / 4; ++i) {
    const V a = pairs[2 * i], b = pairs[2 * i + 1];
    sums[i] = __builtin_shuffle(a, b, FourInts{0, 1, 4, 5}) + __builtin_shuffle(a, b, FourInts{2, 3, 6, 7});
  }
}
#endif

/// out[i] = the sum over x[i]'s lanes, for kLanes vectors.
static FASTKV_INLINE void store_sums(float* out, const Floats* x) {
#if defined(__AVX__) && !defined(__AVX512F__)
  FourFloats halves[kLanes], sums[kLanes / 4];
  for (int i = 0; i < kLanes; ++i) {
    halves[i] = (FourFloats)_mm256_castps256_ps128((__m256)x[i]) + (FourFloats)_mm256_extractf128_ps((__m256)x[i], 1);
  }
  sum_each_four(halves, sums);
  for (int i = 0; i < kLanes / 4; ++i) _mm_storeu_ps(out + 4 * i, (__m128)sums[i]);
#else
  store(out, sum_each(x));
#endif
}

/// Transposes kLanes x kLanes floats in place.
static FASTKV_INLINE void transpose(Floats* x) {
  Floats a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    a[i] = interleave<0>(x[i], x[i + 1]);
    a[i + 1] = interleave<2>(x[i], x[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {  // each quarter of four rows by itself
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = pairs_of<0>(a[i + j], a[i + 2 + j]);
      b[i + 2 * j + 1] = pairs_of<2>(a[i + j], a[i + 2 + j]);
    }
  }
  for (int i = 0; i < 4; ++i) {  // then quarters as if they were elements
    if constexpr (kLanes == 8) {
      x[i] = quarters_of<0>(b[i], b[i + 4]);
      x[i + 4] = quarters_of<1>(b[i], b[i + 4]);
    } else {
      const Floats even[2] = {quarters_of<0>(b[i], b[i + 4]), quarters_of<0>(b[i + 8], b[i + 12])};
      const Floats odd[2] = {quarters_of<1>(b[i], b[i + 4]), quarters_of<1>(b[i + 8], b[i + 12])};
      x[i] = quarters_of<0>(even[0], even[1]);
      x[i + 4] = quarters_of<0>(odd[0], odd[1]);
      x[i + 8] = quarters_of<1>(even[0], even[1]);
      x[i + 12] = quarters_of<1>(odd[0], odd[1]);
    }
  }
}

/// The largest of each run of N lanes, in all of its lanes; N is a power of two.
template <int N>
static FASTKV_INLINE Floats max_of_runs(Floats x) {
  if constexpr (N >= 2) x = max_each(permute(x, [](int l) { return l ^ 1; }), x);
  if constexpr (N >= 4) x = max_each(permute(x, [](int l) { return l ^ 2; }), x);
  if constexpr (N >= 8) x = max_each(permute(x, [](int l) { return l ^ 4; }), x);
  if constexpr (N >= 16) x = max_each(permute(x, [](int l) { return l ^ 8; }), x);
  return x;
}

/// The sum of each run of N lanes, in all of its lanes; N is a power of two.
template <int N>
static FASTKV_INLINE Floats sum_of_runs(Floats x) {
  if constexpr (N >= 2) x += permute(x, [](int l) { return l ^ 1; });
  if constexpr (N >= 4) x += permute(x, [](int l) { return l ^ 2; });
  if constexpr (N >= 8) x += permute(x, [](int l) { return l ^ 4; });
  if constexpr (N >= 16) x += permute(x, [](int l) { return l ^ 8; });
  return x;
}

/// x = e^x for N vectors, x <= 0, as 2^n * 2^r, n an integer and |r| <= 1/2; 0 where n would be below the normal
/// floats' (x < -87.7), NaN stays NaN. The error is 2e-7 of the result near 0, and grows by 2e-8 |x|, as that of x
/// itself does. The polynomial is a minimax fit of 2^r (relative, 9e-8). Vectors take turns, operation by operation:
/// each chain is some 50 cycles long, more than a small scheduler can look ahead.
template <int N>
static FASTKV_INLINE void exp_nonpositive(Floats (&x)[N]) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kPolynomial[] = {9.671512991189957e-3f, 5.550733581185341e-2f, 2.4022242426872253e-1f,
                                   6.931470036506653e-1f, 1.0f};
  const Floats magic =
      splat(12582912.0f + 127.0f);  // rounds to an integer in the adder, and leaves n + 127 in its bits
  Floats shifted[N], y[N];
  for (int i = 0; i < N; ++i) x[i] = max_each(splat(-88.0f), x[i]);  // n = -127
  for (int i = 0; i < N; ++i) shifted[i] = x[i] * kLog2E + magic;
  for (int i = 0; i < N; ++i) x[i] = x[i] * kLog2E - (shifted[i] - magic);
  for (int i = 0; i < N; ++i) y[i] = splat(1.326472731307149e-3f);
  for (float term : kPolynomial) {
    for (int i = 0; i < N; ++i) y[i] = y[i] * x[i] + term;
  }
  for (int i = 0; i < N; ++i) x[i] = y[i] * (Floats)((Ints)shifted[i] << 23);  // times 2^n, or 0
}

static FASTKV_INLINE Floats exp_nonpositive(Floats x) {
  Floats each[] = {x};
  exp_nonpositive(each);
  return each[0];
}

}  // namespace fastkv::FASTKV_ISA
