// Eight floats as one value, by GCC's vector extension: AVX where a source is compiled for it, pairs of SSE registers
// elsewhere. Plus the few things that the attention kernels need of them.
#pragma once

#include <cstdint>

#include "fastkv/storage.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace fastkv::FASTKV_ISA {

typedef float F8 __attribute__((vector_size(32), may_alias));
typedef int32_t I8 __attribute__((vector_size(32), may_alias));
typedef float UnalignedF8 __attribute__((vector_size(32), may_alias, aligned(4)));
inline constexpr int64_t kLanes = 8;

static FASTKV_INLINE F8 load8(const float* p) { return *reinterpret_cast<const UnalignedF8*>(p); }
static FASTKV_INLINE void store8(float* p, F8 x) { *reinterpret_cast<UnalignedF8*>(p) = x; }
static FASTKV_INLINE F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }
static FASTKV_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
static FASTKV_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static FASTKV_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static FASTKV_INLINE float minus_infinity() { return -__builtin_inff(); }

/// x where the mask's lanes are all ones, else y.
static FASTKV_INLINE F8 select(I8 mask, F8 x, F8 y) { return (F8)(((I8)x & mask) | ((I8)y & ~mask)); }

/// x > y ? x : y in each lane: y where either is NaN.
static FASTKV_INLINE F8 max8(F8 x, F8 y) {
#ifdef __AVX__
  return (F8)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return select(x > y, x, y);
#endif
}

/// Lane i of the result is the sum over x[i]'s lanes.
static FASTKV_INLINE F8 sum_each(const F8* x) {
  F8 pairs[4], quads[2];
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], I8{0, 8, 1, 9, 4, 12, 5, 13}) +
               __builtin_shuffle(x[2 * i], x[2 * i + 1], I8{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (int i = 0; i < 2; ++i) {
    quads[i] = __builtin_shuffle(pairs[2 * i], pairs[2 * i + 1], I8{0, 1, 8, 9, 4, 5, 12, 13}) +
               __builtin_shuffle(pairs[2 * i], pairs[2 * i + 1], I8{2, 3, 10, 11, 6, 7, 14, 15});
  }
  return __builtin_shuffle(quads[0], quads[1], I8{0, 1, 2, 3, 8, 9, 10, 11}) +
         __builtin_shuffle(quads[0], quads[1], I8{4, 5, 6, 7, 12, 13, 14, 15});
}

/// Transposes 8 x 8 floats in place.
static FASTKV_INLINE void transpose8(F8* x) {
  F8 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], I8{0, 8, 1, 9, 4, 12, 5, 13});
    a[2 * i + 1] = __builtin_shuffle(x[2 * i], x[2 * i + 1], I8{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = __builtin_shuffle(a[4 * i + j], a[4 * i + 2 + j], I8{0, 1, 8, 9, 4, 5, 12, 13});
      b[4 * i + 2 * j + 1] = __builtin_shuffle(a[4 * i + j], a[4 * i + 2 + j], I8{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = __builtin_shuffle(b[i], b[i + 4], I8{0, 1, 2, 3, 8, 9, 10, 11});
    x[i + 4] = __builtin_shuffle(b[i], b[i + 4], I8{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

/// The largest of each run of N lanes, in all of its lanes; N is 2, 4 or 8.
template <int N>
static FASTKV_INLINE F8 max_of_runs(F8 x) {
  x = max8(__builtin_shuffle(x, I8{1, 0, 3, 2, 5, 4, 7, 6}), x);
  if (N >= 4) x = max8(__builtin_shuffle(x, I8{2, 3, 0, 1, 6, 7, 4, 5}), x);
  if (N >= 8) x = max8(__builtin_shuffle(x, I8{4, 5, 6, 7, 0, 1, 2, 3}), x);
  return x;
}

/// The sum of each run of N lanes, in all of its lanes; N is 2, 4 or 8.
template <int N>
static FASTKV_INLINE F8 sum_of_runs(F8 x) {
  x += __builtin_shuffle(x, I8{1, 0, 3, 2, 5, 4, 7, 6});
  if (N >= 4) x += __builtin_shuffle(x, I8{2, 3, 0, 1, 6, 7, 4, 5});
  if (N >= 8) x += __builtin_shuffle(x, I8{4, 5, 6, 7, 0, 1, 2, 3});
  return x;
}

/// e^x for x <= 0, to about 1e-7 relative; 0 below -87.3, NaN stays NaN. The polynomial is Cephes' expf.
static FASTKV_INLINE F8 exp_nonpositive(F8 x) {
  const F8 floor = splat(-87.33654f);
  const I8 underflows = x < floor;
  const F8 clipped = max8(floor, x);
  const F8 magic = splat(12582912.0f);  // rounds to an integer in the adder
  const F8 shifted = clipped * 1.44269504088896341f + magic;
  const F8 n = shifted - magic;
  const F8 r = (clipped - n * 0.693359375f) + n * 2.12194440e-4f;
  F8 y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const F8 power = (F8)(((I8)shifted - (I8)magic + 127) << 23);  // 2^n
  return (F8)((I8)(y * power) & ~underflows);
}

}  // namespace fastkv::FASTKV_ISA
