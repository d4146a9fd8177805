// Attention for a few query rows that share one walk over K and V: decoding, and the verification of few tokens. Every
// stored byte is read once for the whole group of rows and becomes floats in registers.
//
// Scores are kept a step at a time: T positions of R rows fill the lanes of one vector, row by row, so that soft-max
// works on full vectors for any R, and as many sums of products as there are lanes are reduced together.
#pragma once

#include <cstring>
#include <type_traits>

#include "fastkv/lanes.h"

namespace fastkv::FASTKV_ISA {

inline constexpr int kMaxRows = 4;  // rows of one kernel call

/// Positions that one vector of scores holds for so many rows.
static FASTKV_INLINE constexpr int step_positions(int64_t rows) { return kLanes / (rows > 2 ? 4 : rows); }
template <int R>
inline constexpr int kStep = step_positions(R);

/// Lines to fetch ahead while a kernel walks rows: row i of `rows`, `lines` cache lines each; lines == 0: none.
struct Ahead {
  const char* const* rows = nullptr;
  int64_t count = 0;
  int64_t lines = 0;
};

/// To the first-level cache only: the bytes are used once.
static FASTKV_INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 0); }

/// What one row-kernel call works on.
struct RowsJob {
  const char* const* keys;    // count pointers
  const char* const* values;  // count pointers
  int64_t count;
  int64_t key_groups;
  int64_t value_vecs;
  int64_t key_bytes;  // of a stored key
  const float* q;     // R rows of q_stride floats, in lane order; or bytes, for kernels that take those
  int64_t q_stride;
  float* scores;  // count / kStep<R> vectors, rounded up
  float* out;     // R rows of out_stride floats, in lane order
  int64_t out_stride;
  const float* shrink;  // R factors for what out holds
  Ahead ahead;
};

/// Writes raw scores (q . k) of R rows; true if a NaN code was seen.
using ScoreRows = bool (*)(const RowsJob& job);
/// out = out * shrink + weights . values for R rows; true if a NaN code was seen.
using AddRows = bool (*)(const RowsJob& job);

static FASTKV_INLINE void keep_in_register(Floats& x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#else
  (void)x;
#endif
}

template <int V, int N, typename Body>
static FASTKV_INLINE void unrolled(Body&& body) {
  if constexpr (V < N) {
    body(std::integral_constant<int, V>{});
    unrolled<V + 1, N>(body);
  }
}

template <typename L, int R>
static bool score_rows(const RowsJob& job) {
  constexpr int T = kStep<R>;
  NanWatch<L::kHasNanCode> nan;
  for (int64_t c = 0; c < job.count; c += T) {
    const char* keys[T];
    const char* ahead[T];  // a line of these for every line of the keys
    for (int t = 0; t < T; ++t) {
      keys[t] = job.keys[c + t < job.count ? c + t : job.count - 1];
      ahead[t] = c + t < job.ahead.count ? job.ahead.rows[c + t] : keys[t];
    }
    Floats sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = splat(0.0f);
    const float* q = job.q;
    for (int64_t g = 0; g < job.key_groups; ++g, q += L::kVecs * kLanes) {
      unrolled<0, L::kVecs>([&](auto v) {
        Floats key[T];
        for (int t = 0; t < T; ++t) key[t] = L::template get<v>(keys[t] + g * L::kBytes);
        for (int r = 0; r < R; ++r) {
          Floats query = load(q + r * job.q_stride + v * kLanes);
          keep_in_register(query);  // or GCC loads it again for each of the T products
          for (int t = 0; t < T; ++t) sums[r * T + t] += query * key[t];
        }
      });
      for (int t = 0; t < T; ++t) nan.template look<L>(keys[t] + g * L::kBytes);
      if ((g * L::kBytes & 63) == 0) {
        for (int t = 0; t < T; ++t) fetch(ahead[t] + g * L::kBytes);
      }
    }
    store(job.scores + c / T * kLanes, sum_each(sums));
  }
  return nan.seen();
}

/// What one part of add_rows fetches: lines [begin, end) of the rows whose index & mask is phase. So each line is
/// fetched once, and fetches are as evenly spread over the work as they can be: a burst would fill the miss buffers and
/// hold up the loads behind it.
struct FetchPart {
  int64_t begin;
  int64_t end;
  int64_t mask;
  int64_t phase;
};

static inline FetchPart fetch_part(int64_t lines, int64_t parts, int64_t part) {
  if (lines == 0) return {0, 0, 0, 0};
  if (lines >= parts) {
    const int64_t each = (lines + parts - 1) / parts;
    return {part * each, smaller((part + 1) * each, lines), 0, 0};
  }
  int64_t share = 1;  // parts that share a line
  while (2 * share * lines <= parts) share *= 2;
  const int64_t line = part / share;
  return {line, line < lines ? line + 1 : line, share - 1, part % share};
}

/// J vectors of R rows, from vector V0 of the group that starts at byte `at` of each row.
template <typename L, int R, int J, int V0>
static FASTKV_INLINE bool add_part(const RowsJob& job, int64_t at, int64_t vec, const FetchPart& part) {
  constexpr int T = kStep<R>;
  NanWatch<L::kHasNanCode && V0 == 0> nan;
  Floats sums[R][J];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) sums[r][j] = splat(0.0f);
  }
  const auto add = [&](int64_t c, const float* weights) {
    const char* row = job.values[c] + at;
    Floats value[J];
    unrolled<0, J>([&](auto j) {
      constexpr int v = V0 + j;
      value[j] = L::template get<v % L::kVecs>(row + v / L::kVecs * L::kBytes);
      if constexpr (v % L::kVecs == 0) nan.template look<L>(row + v / L::kVecs * L::kBytes);
    });
    for (int r = 0; r < R; ++r) {
      const Floats weight = splat(weights[r * T]);
      for (int j = 0; j < J; ++j) sums[r][j] += weight * value[j];
    }
  };
  const float* weights = job.scores;
  const int64_t fetched = part.begin < part.end ? job.ahead.count : 0;
  int64_t c = 0;
  for (; c + T <= job.count; c += T, weights += kLanes) {
    for (int t = 0; t < T; ++t) {
      add(c + t, weights + t);
      if (c + t < fetched && ((c + t) & part.mask) == part.phase) {
        for (int64_t line = part.begin; line < part.end; ++line) fetch(job.ahead.rows[c + t] + line * 64);
      }
    }
  }
  for (int t = 0; c + t < job.count; ++t) add(c + t, weights + t);
  // summing a chunk by itself first also keeps rounding errors from growing with the context
  for (int r = 0; r < R; ++r) {
    const Floats shrink = splat(job.shrink[r]);
    for (int j = 0; j < J; ++j) {
      float* out = job.out + r * job.out_stride + (vec + j) * kLanes;
      store(out, load(out) * shrink + sums[r][j]);
    }
  }
  return nan.seen();
}

template <typename L, int R>
static bool add_rows(const RowsJob& job) {
  // enough independent sums to hide the adder's latency, few enough for the registers, of which AVX-512 has twice as
  // many; 4 of its vectors are a row of 64 channels
  constexpr int J = kLanes == 16 ? 4 : R == 1 ? 8 : R == 2 ? 4 : 2;
  constexpr int kSpan = J > L::kVecs ? J : L::kVecs;
  constexpr int kRest = J < L::kVecs ? J : L::kVecs;
  const int64_t parts = (job.value_vecs + J - 1) / J;
  bool nan = false;
  int64_t vec = 0, part = 0;
  const auto next = [&] { return fetch_part(job.ahead.lines, parts, part++); };
  for (; vec + kSpan <= job.value_vecs; vec += kSpan) {
    unrolled<0, kSpan / J>(
        [&](auto i) { nan |= add_part<L, R, J, i * J>(job, vec / L::kVecs * L::kBytes, vec + i * J, next()); });
  }
  for (; vec < job.value_vecs; vec += L::kVecs) {
    unrolled<0, L::kVecs / kRest>([&](auto i) {
      nan |= add_part<L, R, kRest, i * kRest>(job, vec / L::kVecs * L::kBytes, vec + i * kRest, next());
    });
  }
  return nan;
}

/// The kernels of one storage type and row length.
struct RowKernels {
  ScoreRows score[kMaxRows] = {};  // [rows - 1]; null: no kernel, rows have to be decoded first
  AddRows add[kMaxRows] = {};
  int64_t vecs = 1;          // vectors a group: channel order
  int64_t group_dim = 8;     // channels a group
  float offset = 0.0f;       // stored code = value + offset
  int unit = 0;              // lane = stored code * 2^-unit, but for a carry:
  bool takes_bytes = false;  // the query is bytes, and groups need not fill the row (dot_codes.h)
  int carry_bits = 0;        // if not 0, vector v holds 1 + 2^-carry_bits * (code + what vector v - 1 holds above 1)
  bool is_tiny() const { return unit > 64; }  // lanes are at or below the smallest normal floats
};

template <typename L>
static RowKernels row_kernels_of(float offset, int unit, int carry_bits = 0) {
  return {{&score_rows<L, 1>, &score_rows<L, 2>, &score_rows<L, 3>, &score_rows<L, 4>},
          {&add_rows<L, 1>, &add_rows<L, 2>, &add_rows<L, 3>, &add_rows<L, 4>},
          L::kVecs,
          L::kVecs * kLanes,
          offset,
          unit,
          false,
          carry_bits};
}

#ifdef __AVX2__
template <int kBits, int W>
static RowKernels integer_kernels(float offset, bool fast_subnormals) {
  constexpr float kOne = 1 << kBits;  // what a lane of 1.0 stands for
  if (kLanes == 16) return row_kernels_of<MantissaLanes<kBits, W>>(offset + kOne, kBits);
  if (fast_subnormals) return row_kernels_of<SubnormalLanes<kBits, W>>(offset, 149);
  return row_kernels_of<CarryLanes<kBits, W>>(offset, kBits, kBits);
}
#endif

/// Kernels that read a cache of this storage and row length as it lies: those with most codes to a 32-bit lane that
/// whole groups of fill the row. kernels.score[0] is null if there are none.
static RowKernels find_row_kernels(Storage storage, ModelDtype dtype, int64_t dim, bool fast_subnormals) {
  if (dim % kLanes != 0) return {};
  if (storage == Storage::kNone && dtype == ModelDtype::kFloat32) return row_kernels_of<Float32Lanes>(0.0f, 0);
#ifndef __AVX2__
  (void)fast_subnormals;
#else
  const int64_t vecs = dim / kLanes;
  // with 16 lanes rows of 80 channels need the narrow groups that 8 lanes can do without
  constexpr bool kNarrow = kLanes == 16;
  switch (storage) {
    case Storage::kNone:
      if (dtype == ModelDtype::kFloat16) return row_kernels_of<Float16Lanes>(0.0f, 0);
      if (vecs % 2 == 0) return row_kernels_of<BFloat16Lanes<4>>(0.0f, 0);
      if constexpr (kNarrow) return row_kernels_of<BFloat16Lanes<2>>(0.0f, 0);
      break;
    case Storage::kInt8:
    case Storage::kInt8Zp:
    case Storage::kInt8Token:
      if (vecs % 4 == 0) return integer_kernels<8, 4>(128.0f, fast_subnormals);
      if (vecs % 2 == 0) return integer_kernels<8, 2>(128.0f, fast_subnormals);
      if constexpr (kNarrow) return integer_kernels<8, 1>(128.0f, fast_subnormals);
      break;
    case Storage::kInt4Zp:
      if (vecs % 8 == 0) return integer_kernels<4, 4>(8.0f, fast_subnormals);
      if (vecs % 4 == 0) return integer_kernels<4, 2>(8.0f, fast_subnormals);
      if (vecs % 2 == 0) return integer_kernels<4, 1>(8.0f, fast_subnormals);
      break;
    case Storage::kFloat8E4M3:
    case Storage::kFloat8E4M3Zp:
    case Storage::kBlockWiseFp8:
      if (vecs % 4 == 0) return row_kernels_of<Float8Lanes<4>>(0.0f, 120);
      if (vecs % 2 == 0) return row_kernels_of<Float8Lanes<2>>(0.0f, 120);
      if constexpr (kNarrow) return row_kernels_of<Float8Lanes<1>>(0.0f, 120);
      break;
    default:
      break;
  }
#endif
  return {};
}

}  // namespace fastkv::FASTKV_ISA
