// float32 <-> float16, bfloat16 and float8 e4m3fn codes, round half to even, without branches, so that loops over them
// vectorise. Included by the sources that are compiled once an instruction set: everything is in FASTKV_ISA.
//
// Bit tricks used: rounding to a multiple of 2^-k happens in the adder, by adding 2^(23-k) and subtracting its bits;
// rounding a mantissa to fewer bits adds just under half and lets the carry run into the exponent.
#pragma once

#include <cstdint>
#include <cstring>

#include "fastkv/code_vectors.h"
#include "fastkv/storage.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace fastkv::FASTKV_ISA {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float bf16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

static inline uint16_t float_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = u + 0x7FFFu + ((u >> 16) & 1u);
  // NaN: keep it one (rounding could carry it into infinity or zero)
  return static_cast<uint16_t>((x != x ? (u | 0x00400000u) : rounded) >> 16);
}

static inline float f16_to_float(uint16_t h) {
  const uint32_t magnitude = h & 0x7FFFu;
  const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  const uint32_t special = (magnitude << 13) | 0x7F800000u;  // infinity and NaN
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t u = magnitude >= 0x7C00u ? special : magnitude < 0x400u ? bits_of(subnormal) : normal;
  return float_of(u | (static_cast<uint32_t>(h & 0x8000u) << 16));
}

static inline uint16_t float_to_f16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  const uint32_t normal = (rounded >> 13) - ((127u - 15u) << 10);
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
  h = magnitude >= 0x477FF000u ? 0x7C00u : h;                 // 65520 and above round to infinity
  h = magnitude > 0x7F800000u ? 0x7E00u : h;
  return static_cast<uint16_t>(h | ((u >> 16) & 0x8000u));
}

/// Saturates at +-448, infinities too; every NaN becomes the code 0x7F.
static inline uint8_t float_to_e4m3(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  const uint32_t normal = (rounded >> 20) - ((127u - 7u) << 3);
  const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);  // multiples of 2^-9
  uint32_t code = magnitude < 0x3C800000u ? subnormal : normal;                            // 2^-6
  code = magnitude >= 0x43E00000u ? 0x7Eu : code;                                          // 448
  code |= (u >> 24) & 0x80u;
  return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x7Fu : code);
}

static inline float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  uint32_t u = magnitude < 8u ? bits_of(subnormal) : normal;
  u = magnitude == 0x7Fu ? 0x7FC00000u : u;
  return float_of(u | (static_cast<uint32_t>(code & 0x80u) << 24));
}

/// Element i of a row of the model.
template <ModelDtype D>
static inline float load_one(const char* row, int64_t i) {
  if constexpr (D == ModelDtype::kFloat32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(row)[i];
  return D == ModelDtype::kFloat16 ? f16_to_float(half) : bf16_to_float(half);
}

static void load_float32(const char* src, int64_t n, float* out) { std::memcpy(out, src, static_cast<size_t>(n) * 4); }
static void store_float32(const float* x, int64_t n, char* dst) { std::memcpy(dst, x, static_cast<size_t>(n) * 4); }

static void load_bfloat16(const char* src, int64_t n, float* out) {
  const uint16_t* h = reinterpret_cast<const uint16_t*>(src);
  for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(h[i]);
}
static void store_bfloat16(const float* x, int64_t n, char* dst) {
  uint16_t* h = reinterpret_cast<uint16_t*>(dst);
  int64_t i = 0;
#ifdef __AVX2__
  while (i + 16 <= n && store_bf16_sixteen(x + i, h + i)) i += 16;
#endif
  for (; i < n; ++i) h[i] = float_to_bf16(x[i]);
}

static void load_float16(const char* src, int64_t n, float* out) {
  const uint16_t* h = reinterpret_cast<const uint16_t*>(src);
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
  }
#endif
  for (; i < n; ++i) out[i] = f16_to_float(h[i]);
}
static void store_float16(const float* x, int64_t n, char* dst) {
  uint16_t* h = reinterpret_cast<uint16_t*>(dst);
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(h + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#endif
  for (; i < n; ++i) h[i] = float_to_f16(x[i]);
}

}  // namespace fastkv::FASTKV_ISA
