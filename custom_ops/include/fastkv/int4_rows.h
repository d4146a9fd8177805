// Row kernels for 4-bit codes that multiply bytes instead of floats: unsigned with signed ones, two products to a
// 16-bit sum (vpmaddubsw). An instruction makes four times as many products as a multiply-add of floats, of codes that
// need no conversion. For models of bfloat16, whose own rounding is as coarse as that to a byte (docs/attention.md has
// errors).
//
// Scores: the query comes as signed bytes (byte_query.h), codes as they are stored, 0 to 15.
// Values: weights become unsigned bytes, and codes count from -8 to 7. The weights of kRun positions are multiples of
// one step, rounded up or down by a pattern that leaves their sum alone, so that many small ones do not vanish beside a
// large one. The sum of weights becomes that of the rounded ones, so results stay weighted means of values.
//
// No 16-bit sum overflows. A score's has at most 16 products of 15 * 127 (rows of 256 channels); weights of a run are
// rounded so coarsely that they add up to kMostWeight at most.
#pragma once

#include "fastkv/byte_query.h"
#include "fastkv/params.h"
#include "fastkv/rows.h"

namespace fastkv::FASTKV_ISA {

#ifdef __AVX2__

inline constexpr int kRun = 32;           // positions whose weights share a step
inline constexpr int kMostWeight = 4095;  // sum of a run's weights, in steps
static_assert(2 * (kMaxKeyDim / (8 * kLanes)) * 2 * 15 * 127 < 1 << 15 && kMostWeight * 8 < 1 << 15, "sums overflow");

typedef int8_t Bytes __attribute__((vector_size(4 * kLanes), may_alias));

#ifdef __AVX512F__
#define FASTKV_WIDE(name) _mm512_##name
typedef __m512i WideInts;
#else
#define FASTKV_WIDE(name) _mm256_##name
typedef __m256i WideInts;
#endif

static FASTKV_INLINE Bytes load_bytes(const char* p) {
  typedef int8_t Unaligned __attribute__((vector_size(4 * kLanes), may_alias, aligned(1)));
  return *reinterpret_cast<const Unaligned*>(p);
}
static FASTKV_INLINE Bytes low_codes(Bytes x) { return x & 15; }
static FASTKV_INLINE Bytes high_codes(Bytes x) { return (Bytes)((Shorts)x >> 4) & 15; }
static FASTKV_INLINE Ints rounded(Floats x) { return (Ints)FASTKV_WIDE(cvtps_epi32)(x); }

/// The lower (P = 0) or upper eight bytes of each quarter (vec.h) of x and y, taken in turns.
template <int P>
static FASTKV_INLINE Bytes interleave_bytes(Bytes x, Bytes y) {
  if constexpr (P == 0) return (Bytes)FASTKV_WIDE(unpacklo_epi8)((WideInts)x, (WideInts)y);
  return (Bytes)FASTKV_WIDE(unpackhi_epi8)((WideInts)x, (WideInts)y);
}

/// sum += products of x's unsigned bytes and y's signed ones, two neighbours added. As text: see add_product().
static FASTKV_INLINE void add_byte_products(Shorts& sum, Bytes x, Bytes y) {
  Shorts products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(x), "v"(y));
}

/// out[i] = the sum over x[i]'s lanes, for kLanes vectors.
static FASTKV_INLINE void store_sums(float* out, const Shorts* x) {
  Ints sums[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    sums[i] = (Ints)FASTKV_WIDE(madd_epi16)((WideInts)x[i], FASTKV_WIDE(set1_epi16)(1));
  }
  store(out, __builtin_convertvector(sum_each(sums), Floats));
}

/// The same where a lane has room for two of them: halves first.
static FASTKV_INLINE void store_small_sums(float* out, const Shorts* x) {
#ifdef __AVX512F__
  store_sums(out, x);
#else
  FourInts halves[kLanes], sums[kLanes / 4];
  for (int i = 0; i < kLanes; ++i) {
    const __m128i half =
        _mm_add_epi16(_mm256_castsi256_si128((__m256i)x[i]), _mm256_extracti128_si256((__m256i)x[i], 1));
    halves[i] = (FourInts)_mm_madd_epi16(half, _mm_set1_epi16(1));
  }
  sum_each_four(halves, sums);
  for (int i = 0; i < kLanes / 4; ++i) _mm_storeu_ps(out + 4 * i, _mm_cvtepi32_ps((__m128i)sums[i]));
#endif
}

/// Adds the products of one group of T keys, at byte `at` of each, with R queries, at twice that byte.
template <int R>
static FASTKV_INLINE void score_int4_group(const char* const* keys, int64_t at, const char* queries,
                                           Shorts (&sums)[kLanes]) {
  constexpr int T = kStep<R>;
  Bytes stored[T];
  repeated<T>([&](auto t) FASTKV_INLINE_BODY { stored[t] = load_bytes(keys[t] + at); });
  unrolled<2>([&](auto code) FASTKV_INLINE_BODY {
    Bytes key[T];
    repeated<T>([&](auto t) FASTKV_INLINE_BODY { key[t] = code == 0 ? low_codes(stored[t]) : high_codes(stored[t]); });
    repeated<R>([&](auto r) FASTKV_INLINE_BODY {
      constexpr int64_t kStride = kQueryStride * static_cast<int64_t>(sizeof(float));
      Bytes query = load_bytes(queries + r * kStride + 2 * at + code * kGroupBytes);
      keep_in_register(query);
      repeated<T>([&](auto t) FASTKV_INLINE_BODY { add_byte_products(sums[r * T + t], key[t], query); });
    });
  });
}

/// Writes sums of stored code * query code of R rows; as ScoreRows.
template <int R>
static bool score_int4(const RowsJob& job) {
  constexpr int T = kStep<R>;
  const char* queries = reinterpret_cast<const char*>(job.q);
  float* scores = job.scores;
  for (int64_t c = 0; c < job.count; c += T, scores += kLanes) {
    const char* const* keys = job.keys + c;
    const char* const* ahead = job.ahead + c;
    Shorts sums[kLanes];
    repeated<kLanes>([&](auto i) FASTKV_INLINE_BODY { sums[i] = Shorts{}; });
    int64_t at = 0;
    for (; at + 2 * kGroupBytes <= job.key_bytes; at += 2 * kGroupBytes) {
      score_int4_group<R>(keys, at, queries, sums);
      score_int4_group<R>(keys, at + kGroupBytes, queries, sums);
      for (int64_t line = at; line < at + 2 * kGroupBytes; line += 64) {
        repeated<T>([&](auto t) FASTKV_INLINE_BODY { fetch(ahead[t] + line); });
      }
    }
    if (at < job.key_bytes) {
      score_int4_group<R>(keys, at, queries, sums);
      repeated<T>([&](auto t) FASTKV_INLINE_BODY { fetch(ahead[t] + at); });
    }
    if (job.key_bytes <= 2 * kGroupBytes) {
      store_small_sums(scores, sums);
    } else {
      store_sums(scores, sums);
    }
  }
  return false;
}

/// What is added to the weight of each position of a run before it is rounded, for vectors of T positions: the
/// fractions of 32 between -1/2 and 1/2 in bit-reversed order, so that any few neighbours have an even share of them.
template <int T>
struct Dither {
  alignas(64) float of[kRun / T][kLanes] = {};
  constexpr Dither() {
    for (int position = 0; position < kRun; ++position) {
      int reversed = 0;
      for (int bit = 1; bit < kRun; bit *= 2) reversed = 2 * reversed + (position & bit ? 1 : 0);
      for (int lane = position % T; lane < kLanes; lane += T) {
        of[position / T][lane] = (static_cast<float>(reversed) + 0.5f) / kRun - 0.5f;
      }
    }
  }
};
template <int T>
inline constexpr Dither<T> kDither;

/// Where, in a vector of R rows' weights, the bytes of row r's position 2 * pair and the next one are: see
/// weights_to_bytes().
template <int R>
static FASTKV_INLINE constexpr int pair_place(int r, int pair) {
  const int lane = r * kStep<R> + 2 * pair;
  return (lane / 4 * 4 + lane % 4 / 2) * static_cast<int>(sizeof(float));
}

/// Replaces weights by bytes: of each quarter's four, code[0] code[1] code[0] code[1], then those of [2] and [3], so
/// that one broadcast fills a vector with two neighbours. Writes each run's step, a lane a weight, and takes what
/// rounding changed out of the rows' sums.
template <int R>
static FASTKV_INLINE void weights_to_bytes(const RowsJob& job, float* steps) {
  constexpr int T = kStep<R>, kVecs = kRun / T;
  constexpr char z = -1;
  const __m128i pairs_twice = _mm_setr_epi8(0, 4, 0, 4, 8, 12, 8, 12, z, z, z, z, z, z, z, z);
#ifdef __AVX512F__
  const __m512i places = _mm512_broadcast_i32x4(pairs_twice);
#else
  const __m256i places = _mm256_broadcastsi128_si256(pairs_twice);
#endif
  const int64_t vecs = (job.count + T - 1) / T;
  Floats lost = splat(0.0f);
  for (int64_t v = 0; v < vecs; v += kVecs, steps += kLanes) {
    float* run = job.scores + v * kLanes;
    const int64_t n = smaller(kVecs, vecs - v);
    Floats largest = splat(0.0f), sum = splat(0.0f);
    for (int64_t i = 0; i < n; ++i) {
      const Floats weight = load(run + i * kLanes);
      largest = max_each(weight, largest);
      sum += weight;
    }
    // each weight is rounded by less than a step
    Floats step =
        max_each(max_of_runs<T>(largest) * (1.0f / 254.0f), sum_of_runs<T>(sum) * (1.0f / (kMostWeight - kRun)));
    step = max_each(step, splat(kMinScale));
    const Floats inverse = 1.0f / step;
    Ints codes = {};
    for (int64_t i = 0; i < n; ++i) {
      const Ints code = rounded(load(run + i * kLanes) * inverse + load(kDither<T>.of[i]));
      codes += code;
      store(run + i * kLanes, (Floats)FASTKV_WIDE(shuffle_epi8)((WideInts)code, places));
    }
    lost += sum - __builtin_convertvector(codes, Floats) * step;
    store(steps, step);
  }
  lost = sum_of_runs<T>(lost);
  for (int r = 0; r < R; ++r) job.sums[r] -= lost[r * T];
}

/// Adds two positions' weights times two vectors of codes, of even and of odd channels: the lower (P = 0) or upper
/// bytes of each quarter of a group.
template <int R, int P>
static FASTKV_INLINE void add_int4_pair(const char* const* values, int64_t at, const char* weights,
                                        Shorts (&sums)[2 * R]) {
  const Bytes stored = interleave_bytes<P>(load_bytes(values[0] + at), load_bytes(values[1] + at));
  const Bytes low = low_codes(stored) - 8, high = high_codes(stored) - 8;
  repeated<R>([&](auto r) FASTKV_INLINE_BODY {
    const Bytes weight = (Bytes)FASTKV_WIDE(set1_ps)(*reinterpret_cast<const float*>(weights + pair_place<R>(r, 0)));
    add_byte_products(sums[2 * r], weight, low);
    add_byte_products(sums[2 * r + 1], weight, high);
  });
}

/// The same for all positions; out: four vectors of each row.
template <int R, int P>
static FASTKV_INLINE void add_int4_part(const RowsJob& job, const float* steps, int64_t at, float* out,
                                        RowFetcher& fetcher) {
  constexpr int T = kStep<R>, kVecs = kRun / T;
  const char* weights = reinterpret_cast<const char*>(job.scores);
  const char* const* values = job.values;
  const int64_t vecs = (job.count + T - 1) / T;
  for (int64_t begin = 0; begin < vecs; begin += kVecs, steps += kLanes) {
    Shorts sums[2 * R];
    repeated<2 * R>([&](auto i) FASTKV_INLINE_BODY {
      sums[i] = Shorts{};
      keep_in_register(sums[i]);  // here and below the loop, or GCC copies each around every product
    });
    const int64_t end = smaller(begin + kVecs, vecs);
    for (int64_t v = begin; v < end; ++v, values += T, weights += 4 * kLanes) {
      unrolled<T / 2>([&](auto pair) FASTKV_INLINE_BODY {
        add_int4_pair<R, P>(values + 2 * pair, at, weights + pair_place<R>(0, pair), sums);
      });
      fetcher.step(v);
    }
    repeated<2 * R>([&](auto i) FASTKV_INLINE_BODY { keep_in_register(sums[i]); });
    repeated<R>([&](auto r) FASTKV_INLINE_BODY {
      const Floats high_step = splat(steps[r * T]), low_step = splat(steps[r * T] * 0x1p-16f);
      repeated<2>([&](auto i) FASTKV_INLINE_BODY {
        const Ints pairs = (Ints)sums[2 * r + i];
        float* to = out + r * job.out_stride + i * 2 * kLanes;
        store(to, load(to) + low_step * __builtin_convertvector(pairs << 16, Floats));
        store(to + kLanes, load(to + kLanes) + high_step * __builtin_convertvector(pairs >> 16, Floats));
      });
    });
  }
}

/// As AddRows; out in the order of fill_int4_order(), less 8 a code.
template <int R>
static bool add_int4(const RowsJob& job) {
  float steps[kMaxChunk / kRun * kLanes];
  weights_to_bytes<R>(job, steps);
  for (int r = 0; r < R; ++r) {
    const Floats shrink = splat(job.shrink[r]);
    for (int64_t v = 0; v < job.value_vecs; ++v) {
      float* out = job.out + r * job.out_stride + v * kLanes;
      store(out, load(out) * shrink);
    }
  }
  const int64_t groups = job.value_vecs / 8;
  RowFetcher fetcher(job.ahead, job.ahead_count, job.ahead_lines, 2 * groups * (job.count / kStep<R>));
  for (int64_t g = 0; g < groups; ++g) {
    float* out = job.out + g * 8 * kLanes;
    add_int4_part<R, 0>(job, steps, g * kGroupBytes, out, fetcher);
    add_int4_part<R, 1>(job, steps, g * kGroupBytes, out + 4 * kLanes, fetcher);
  }
  return false;
}

/// Where add_int4() leaves each channel: byte b of a group is in the (b / 8 % 2)th part, its low code in the first two
/// vectors, and two neighbouring bytes share a lane of those two.
static inline void fill_int4_order(int64_t dim, int32_t* order) {
  for (int64_t channel = 0; channel < dim; ++channel) {
    const int64_t group = channel / (2 * kGroupBytes), byte = channel % (2 * kGroupBytes) / 2;
    const int64_t vec = byte / 8 % 2 * 4 + channel % 2 * 2 + byte % 2, lane = byte / 16 * 4 + byte % 8 / 2;
    order[channel] = static_cast<int32_t>(group * 2 * kGroupBytes + vec * kLanes + lane);
  }
}

/// Makes the kernels of a cache those of this file, if its codes are 4 bits and whole groups of them fill its rows.
/// offset: 8 for keys, whose codes are taken as stored, 0 for values.
static inline void use_int4_rows(const CacheView& cache, float offset, RowKernels* kernels) {
  if (cache.quant.storage != Storage::kInt4Zp || cache.dim % (2 * kGroupBytes) != 0) return;
  *kernels = {{&score_int4<1>, &score_int4<2>, &score_int4<3>, &score_int4<4>},
              {&add_int4<1>, &add_int4<2>, &add_int4<3>, &add_int4<4>}};
  kernels->group_dim = 2 * kGroupBytes;
  kernels->offset = offset;
  kernels->operand_bytes = kQueryBytes<4>;
}

#undef FASTKV_WIDE

#else

static inline void fill_int4_order(int64_t, int32_t*) {}
static inline void use_int4_rows(const CacheView&, float, RowKernels*) {}

#endif  // __AVX2__

}  // namespace fastkv::FASTKV_ISA
