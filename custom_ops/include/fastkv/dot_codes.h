// Scores of integer codes by VNNI, which multiplies unsigned bytes with signed ones and adds four products to a 32-bit
// number: stored codes are unsigned, so it reads the cache as it lies, 64 bytes an instruction.
// The query comes as bytes, too: byte_query.h says how, and what that costs. Sums of products are exact until they
// become one float (rows.h has rows of at most 256 channels: 256 * 255 * 32639 < 2^31).
#pragma once

#include "fastkv/byte_query.h"
#include "fastkv/rows.h"

namespace fastkv::FASTKV_ISA {

#ifdef __AVX512F__

/// Adds to each 32-bit lane of sum the products of its four unsigned bytes in codes and signed bytes in query. As text,
/// because GCC 12 copies sums between registers around the intrinsic, two copies for each of these.
static FASTKV_INLINE void add_products(__m512i& sum, __m512i codes, __m512i query) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(query));
}

/// Writes sums of stored code * query code of R rows; as ScoreRows.
template <int kBits, int R>
static bool dot_rows(const RowsJob& job) {
  constexpr int T = kStep<R>, P = T / 2;  // positions a step, and a pass: 2 * R * P sums in registers
  constexpr int kCodes = 8 / kBits;
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
      for (int64_t at = 0; at < job.key_bytes; at += kDotBytes) {
        const int64_t left = job.key_bytes - at;
        const __mmask64 mask = left >= kDotBytes ? ~0ull : (1ull << left) - 1;
        __m512i stored[P];
        for (int t = 0; t < P; ++t) {
          stored[t] = _mm512_maskz_loadu_epi8(mask, keys[t] + at);
          fetch(ahead[t] + at);
        }
        for (int code = 0; code < kCodes; ++code, q += 2 * kDotBytes) {
          __m512i key[P];
          for (int t = 0; t < P; ++t) {
            key[t] = code == 0 ? stored[t] : _mm512_srli_epi16(stored[t], kBits);
            if (kBits < 8) key[t] = _mm512_and_si512(key[t], _mm512_set1_epi8((1 << kBits) - 1));
          }
          for (int r = 0; r < R; ++r) {
            const char* query = q + r * kQueryStride * static_cast<int64_t>(sizeof(float));
            const __m512i query_high = _mm512_loadu_si512(query), query_low = _mm512_loadu_si512(query + kDotBytes);
            for (int t = 0; t < P; ++t) {
              add_products(high[r][t], key[t], query_high);
              add_products(low[r][t], key[t], query_low);
            }
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int t = 0; t < P; ++t) dots[r * T + pass * P + t] = ((Ints)high[r][t] << 8) + (Ints)low[r][t];
      }
    }
    store(job.scores + c / T * kLanes, __builtin_convertvector(sum_each(dots), Floats));
  }
  return false;
}

template <int kBits>
static void set_dots(float offset, RowKernels* kernels) {
  const RowKernels dots = {{&dot_rows<kBits, 1>, &dot_rows<kBits, 2>, &dot_rows<kBits, 3>, &dot_rows<kBits, 4>},
                           {},
                           8 / kBits,
                           kDotBytes * 8 / kBits,
                           offset,
                           0,
                           true,
                           0,
                           {},
                           {}};
  *kernels = dots;
}

/// Makes the kernels of a key cache those of this file, if its codes are integers.
static inline void use_dots(Storage storage, RowKernels* kernels) {
  const bool is_int8 = storage == Storage::kInt8 || storage == Storage::kInt8Zp || storage == Storage::kInt8Token;
  if (is_int8) set_dots<8>(128.0f, kernels);
  if (storage == Storage::kInt4Zp) set_dots<4>(8.0f, kernels);
}

#else

static inline void use_dots(Storage, RowKernels*) {}

#endif  // __AVX512F__

}  // namespace fastkv::FASTKV_ISA
