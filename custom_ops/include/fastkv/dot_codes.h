// Scores of 8-bit codes by VNNI, which multiplies unsigned bytes with signed ones and adds four products to a 32-bit
// number: stored codes are unsigned, so it reads the cache as it lies, 64 bytes an instruction.
// The query comes as bytes, too: byte_query.h says how, and what that costs. Sums of products are exact until they
// become one float (rows.h has rows of at most 256 channels: 256 * 255 * 32639 < 2^31).
#pragma once

#include "fastkv/byte_query.h"
#include "fastkv/params.h"
#include "fastkv/rows.h"

namespace fastkv::FASTKV_ISA {

#ifdef __AVX512F__

/// Adds to each 32-bit lane of sum the products of its four unsigned bytes in codes and signed bytes in query. As text,
/// because GCC 12 copies sums between registers around the intrinsic, two copies for each of these.
static FASTKV_INLINE void add_products(__m512i& sum, __m512i codes, __m512i query) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(query));
}

/// Writes sums of stored code * query code of R rows; as ScoreRows.
template <int R>
static bool dot_rows(const RowsJob& job) {
  constexpr int T = kStep<R>, P = T / 2;  // positions a step, and a pass: 2 * R * P sums in registers
  for (int64_t c = 0; c < job.count; c += T) {
    Ints dots[kLanes] = {};
    for (int pass = 0; pass < 2; ++pass) {
      const char* keys[P];
      const char* ahead[P];
      for (int t = 0; t < P; ++t) {
        const int64_t at = c + pass * P + t;
        keys[t] = job.keys[at];
        ahead[t] = job.ahead[at];
      }
      __m512i high[R][P], low[R][P];
      for (int r = 0; r < R; ++r) {
        for (int t = 0; t < P; ++t) high[r][t] = low[r][t] = _mm512_setzero_si512();
      }
      const char* q = reinterpret_cast<const char*>(job.q);
      for (int64_t at = 0; at < job.key_bytes; at += kGroupBytes) {
        const int64_t left = job.key_bytes - at;
        const __mmask64 mask = left >= kGroupBytes ? ~0ull : (1ull << left) - 1;
        __m512i stored[P];
        for (int t = 0; t < P; ++t) {
          stored[t] = _mm512_maskz_loadu_epi8(mask, keys[t] + at);
          fetch(ahead[t] + at);
        }
        for (int r = 0; r < R; ++r) {
          const char* query = q + r * kQueryStride * static_cast<int64_t>(sizeof(float));
          const __m512i query_high = _mm512_loadu_si512(query), query_low = _mm512_loadu_si512(query + kGroupBytes);
          for (int t = 0; t < P; ++t) {
            add_products(high[r][t], stored[t], query_high);
            add_products(low[r][t], stored[t], query_low);
          }
        }
        q += 2 * kGroupBytes;
      }
      for (int r = 0; r < R; ++r) {
        for (int t = 0; t < P; ++t) dots[r * T + pass * P + t] = ((Ints)high[r][t] << 8) + (Ints)low[r][t];
      }
    }
    store(job.scores + c / T * kLanes, __builtin_convertvector(sum_each(dots), Floats));
  }
  return false;
}

/// Makes the score kernels of a cache those of this file, if its codes are integers of 8 bits. Values keep theirs.
static inline void use_dots(const CacheView& cache, RowKernels* kernels) {
  const Storage storage = cache.quant.storage;
  if (storage != Storage::kInt8 && storage != Storage::kInt8Zp && storage != Storage::kInt8Token) return;
  *kernels = {{&dot_rows<1>, &dot_rows<2>, &dot_rows<3>, &dot_rows<4>}, {}};
  kernels->group_dim = kGroupBytes;
  kernels->offset = 128.0f;
  kernels->operand_bytes = kQueryBytes<8>;
}

#else

static inline void use_dots(const CacheView&, RowKernels*) {}

#endif  // __AVX512F__

}  // namespace fastkv::FASTKV_ISA
