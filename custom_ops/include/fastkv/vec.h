// Eight floats as one value, by GCC's vector extension: AVX where a source is compiled for it, pairs of SSE registers
// elsewhere. Plus the few things that the attention kernel needs of them.
#pragma once

#include <cstdint>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace fastkv::FASTKV_ISA {

typedef float F8 __attribute__((vector_size(32), may_alias));
typedef int32_t I8 __attribute__((vector_size(32), may_alias));
inline constexpr int64_t kLanes = 8;

static inline F8& lanes(float* p) { return *reinterpret_cast<F8*>(p); }  // p is 32-byte aligned
static inline const F8& lanes(const float* p) { return *reinterpret_cast<const F8*>(p); }
static inline F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }
static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static inline float sum_lanes(F8 x) {
#ifdef __AVX__
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
#endif
}

static inline float max_lanes(F8 x) {
  float largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

/// e^x for x <= 0, to about 1e-7 relative; 0 below -87.3, NaN stays NaN. The polynomial is Cephes' expf.
static inline F8 exp_nonpositive(F8 x) {
  const F8 floor = splat(-87.33654f);
  const I8 underflows = x < floor;
  const F8 clipped = (F8)(((I8)x & ~underflows) | ((I8)floor & underflows));
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
