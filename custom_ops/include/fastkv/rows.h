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

inline constexpr int kMaxRows = 4;         // rows of one kernel call
inline constexpr int kMaxVecs = 8;         // vectors of a group
inline constexpr int64_t kMaxChunk = 128;  // positions of one kernel call

/// Positions that one vector of scores holds for R rows.
template <int R>
inline constexpr int kStep = kLanes / (R > 2 ? 4 : R);

/// Longest row of a key, and the distance of two queries: a constant, so that kernels address all of them from one
/// register, and no power of two, which would put them into the same lines of a first-level cache.
inline constexpr int64_t kMaxKeyDim = 256;
inline constexpr int64_t kQueryStride = kMaxKeyDim + 16;

/// To the first-level cache only: the bytes are used once.
static FASTKV_INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 0); }

/// What one row-kernel call works on. Kernels take a step of positions at a time, and pointers are there for whole
/// steps: those past `count` point at any row, whose score nobody reads and whose values nobody touches that could be
/// NaN.
struct RowsJob {
  const char* const* keys;
  const char* const* values;
  const char* const* ahead;  // rows to fetch in the meantime: one a position by score kernels, ...
  int64_t ahead_count;       // ... so many by add kernels,
  int64_t ahead_lines;       // so many lines of each
  int64_t count;
  int64_t key_groups;
  int64_t value_vecs;
  int64_t key_bytes;  // of a stored key
  const float* q;     // R rows, kQueryStride apart, in lane order; or bytes, for kernels that take those
  float* scores;      // count / kStep<R> vectors, rounded up
  float* out;         // R rows of out_stride floats, in lane order
  int64_t out_stride;
  const float* shrink;  // R factors for what out holds
  float* sums;          // of weights, R; kernels that round weights put them right
};

/// Writes raw scores (q . k) of R rows; true if a NaN code was seen.
using ScoreRows = bool (*)(const RowsJob& job);
/// out = out * shrink + weights . values for R rows; true if a NaN code was seen.
using AddRows = bool (*)(const RowsJob& job);

template <typename V>
static FASTKV_INLINE void keep_in_register(V& x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#else
  (void)x;
#endif
}

/// Calls body(0) ... body(N - 1) with constants. Bodies must be inlined at once (FASTKV_INLINE_BODY), or the arrays of
/// sums that they share stay in memory.
#define FASTKV_INLINE_BODY __attribute__((always_inline))
template <int N, int V = 0, typename Body>
static FASTKV_INLINE void unrolled(Body&& body) {
  if constexpr (V < N) {
    body(std::integral_constant<int, V>{});
    unrolled<N, V + 1>(body);
  }
}

/// The same for bodies that can do without constants: a loop for sanitizers, whose checks of every access would make
/// functions that take minutes to compile.
template <int N, typename Body>
static FASTKV_INLINE void repeated(Body&& body) {
#ifdef __SANITIZE_ADDRESS__
  for (int i = 0; i < N; ++i) body(i);
#else
  unrolled<N>(body);
#endif
}

/// Adds the products of one group of T keys, at byte `at` of each, with R queries.
template <typename L, int R, typename Nan>
static FASTKV_INLINE void score_group(const char* const* keys, int64_t at, const float* q, Floats (&sums)[kLanes],
                                      Nan& nan) {
  constexpr int T = kStep<R>;
  unrolled<L::kVecs>([&](auto v) FASTKV_INLINE_BODY {
    Floats key[T];
    repeated<T>([&](auto t) FASTKV_INLINE_BODY { key[t] = L::template get<v>(keys[t] + at); });
    repeated<R>([&](auto r) FASTKV_INLINE_BODY {
      Floats query = load(q + r * kQueryStride + v * kLanes);
      keep_in_register(query);  // or GCC loads it again for each of the T products
      repeated<T>([&](auto t) FASTKV_INLINE_BODY { add_product(sums[r * T + t], query, key[t]); });
    });
  });
  repeated<T>([&](auto t) FASTKV_INLINE_BODY { nan.template look<L>(keys[t] + at); });
}

template <typename L, int R>
static bool score_rows(const RowsJob& job) {
  constexpr int T = kStep<R>;
  constexpr int kLine = L::kBytes < 64 ? 64 : L::kBytes;  // bytes of the groups that are taken at once
  constexpr int kFloats = L::kVecs * kLanes;
  NanWatch<L::kHasNanCode> nan;
  const int64_t bytes = job.key_groups * L::kBytes;
  float* scores = job.scores;
  for (int64_t c = 0; c < job.count; c += T, scores += kLanes) {
    const char* const* keys = job.keys + c;
    const char* ahead = job.ahead[c];  // T rows, for in a block they are neighbours
    Floats sums[kLanes];
    repeated<kLanes>([&](auto i) FASTKV_INLINE_BODY { sums[i] = splat(0.0f); });
    const float* q = job.q;
    int64_t at = 0;
    for (; at + kLine <= bytes; at += kLine, q += kLine / L::kBytes * kFloats) {
      unrolled<kLine / L::kBytes>(
          [&](auto g) FASTKV_INLINE_BODY { score_group<L, R>(keys, at + g * L::kBytes, q + g * kFloats, sums, nan); });
      repeated<T>([&](auto t) FASTKV_INLINE_BODY { fetch(ahead + T * at + t * 64); });
    }
    if (at < bytes) repeated<T>([&](auto t) FASTKV_INLINE_BODY { fetch(ahead + T * at + t * 64); });
    for (; at < bytes; at += L::kBytes, q += kFloats) score_group<L, R>(keys, at, q, sums, nan);
    store_sums(scores, sums);
  }
  return nan.seen();
}

/// Fetches rows line by line in the order in which they lie, a few lines a step, as evenly as they can be spread over
/// `steps` steps: a burst would fill the miss buffers and hold up the loads behind it.
class RowFetcher {
 public:
  RowFetcher(const char* const* rows, int64_t count, int64_t row_lines, int64_t steps)
      : row_(rows), end_(rows + count), row_bytes_(row_lines * 64) {
    const int64_t lines = count * row_lines;
    if (lines == 0 || steps == 0) return;
    each_ = (lines + steps - 1) / steps;
    while (2 * (mask_ + 1) * lines <= steps) mask_ = 2 * mask_ + 1;
  }

  FASTKV_INLINE void step(int64_t index) {
    if ((index & mask_) != 0) return;
    for (int64_t i = 0; i < each_ && row_ != end_; ++i) {
      fetch(*row_ + at_);
      at_ += 64;
      if (at_ != row_bytes_) continue;
      at_ = 0;
      ++row_;
    }
  }

 private:
  const char* const* row_;
  const char* const* end_;
  int64_t row_bytes_;
  int64_t at_ = 0;
  int64_t each_ = 0;
  int64_t mask_ = 0;
};

/// Adds one position's weights times J vectors of its value, from vector V0 of the group at `group`.
template <typename L, int R, int J, int V0, typename Nan>
static FASTKV_INLINE void add_position(const char* group, const float* weights, Floats (&sums)[R * J], Nan& nan) {
  Floats value[J];
  unrolled<J>([&](auto j) FASTKV_INLINE_BODY {
    constexpr int v = V0 + j;
    value[j] = L::template get<v % L::kVecs>(group + v / L::kVecs * L::kBytes);
    if constexpr (v % L::kVecs == 0) nan.template look<L>(group + v / L::kVecs * L::kBytes);
  });
  repeated<R>([&](auto r) FASTKV_INLINE_BODY {
    Floats weight = splat(weights[r * kStep<R>]);
    keep_in_register(weight);
    repeated<J>([&](auto j) FASTKV_INLINE_BODY { add_product(sums[r * J + j], weight, value[j]); });
  });
}

/// J vectors of R rows, from vector V0 of the group that starts at byte `at` of each row.
template <typename L, int R, int J, int V0>
static FASTKV_INLINE bool add_part(const RowsJob& job, int64_t at, int64_t vec, RowFetcher& fetcher) {
  constexpr int T = kStep<R>;
  NanWatch<L::kHasNanCode && V0 == 0> nan;
  Floats sums[R * J];
  repeated<R * J>([&](auto i) FASTKV_INLINE_BODY { sums[i] = splat(0.0f); });
  const float* weights = job.scores;
  const char* const* rows = job.values;
  const int64_t steps = job.count / T;
  for (int64_t step = 0; step < steps; ++step, rows += T, weights += kLanes) {
    repeated<T>([&](auto t) FASTKV_INLINE_BODY { add_position<L, R, J, V0>(rows[t] + at, weights + t, sums, nan); });
    fetcher.step(step);
  }
  for (const char* const* end = job.values + job.count; rows < end; ++rows, ++weights) {
    add_position<L, R, J, V0>(*rows + at, weights, sums, nan);
  }
  // summing a chunk by itself first also keeps rounding errors from growing with the context
  repeated<R>([&](auto r) FASTKV_INLINE_BODY {
    const Floats shrink = splat(job.shrink[r]);
    float* out = job.out + r * job.out_stride + vec * kLanes;
    unrolled<J>([&](auto j)
                    FASTKV_INLINE_BODY { store(out + j * kLanes, load(out + j * kLanes) * shrink + sums[r * J + j]); });
  });
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
  int64_t vec = 0;
  RowFetcher fetcher(job.ahead, job.ahead_count, job.ahead_lines, parts * (job.count / kStep<R>));
  for (; vec + kSpan <= job.value_vecs; vec += kSpan) {
    unrolled<kSpan / J>(
        [&](auto i) { nan |= add_part<L, R, J, i * J>(job, vec / L::kVecs * L::kBytes, vec + i * J, fetcher); });
  }
  for (; vec < job.value_vecs; vec += L::kVecs) {
    unrolled<L::kVecs / kRest>([&](auto i) {
      nan |= add_part<L, R, kRest, i * kRest>(job, vec / L::kVecs * L::kBytes, vec + i * kRest, fetcher);
    });
  }
  return nan;
}

/// The kernels of one storage type and row length.
struct RowKernels {
  ScoreRows score[kMaxRows] = {};  // [rows - 1]; null: no kernel, rows have to be decoded first
  AddRows add[kMaxRows] = {};
  int64_t vecs = 1;       // vectors a group: channel order
  int64_t group_dim = 8;  // channels a group
  float offset = 0.0f;    // stored code = value + offset
  int unit = 0;           // lane = stored code * 2^-unit, but for a carry:
  int operand_bytes = 0;  // if not 0, queries (and weights of int4_rows.h) are so many bytes each, not floats
  int carry_bits = 0;     // if not 0, vector v holds 1 + 2^-carry_bits * (code + what vector v - 1 holds above 1)
  int8_t vec_unit[kMaxVecs] = {};             // lanes of vector v are 2^vec_unit[v] times as much
  int8_t vec_of[kMaxVecs] = {};               // the vector that holds a lane's v-th code
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
          0,
          carry_bits,
          {},
          {0, 1, 2, 3, 4, 5, 6, 7}};
}

#ifdef __AVX2__
template <int kBits, int W>
static RowKernels integer_kernels(float offset, bool fast_subnormals) {
  constexpr float kOne = 1 << kBits;  // what a lane of 1.0 stands for
  if (kLanes == 16) return row_kernels_of<MantissaLanes<kBits, W>>(offset + kOne, kBits);
  if (fast_subnormals) {
    using Lanes = SubnormalLanes<kBits, W>;
    RowKernels kernels = row_kernels_of<Lanes>(offset, 149);
    for (int v = 0; v < Lanes::kVecs; ++v) kernels.vec_unit[v] = static_cast<int8_t>(Lanes::unit(v));
    return kernels;
  }
  return row_kernels_of<CarryLanes<kBits, W>>(offset, kBits, kBits);
}

template <int W>
static RowKernels float8_kernels() {
  RowKernels kernels = row_kernels_of<Float8Lanes<W>>(0.0f, 120);
  for (int v = 0; v < W; ++v) kernels.vec_of[Float8Lanes<W>::code(v)] = static_cast<int8_t>(v);
  return kernels;
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
      if (vecs % 4 == 0) return float8_kernels<4>();
      if (vecs % 2 == 0) return float8_kernels<2>();
      if constexpr (kNarrow) return float8_kernels<1>();
      break;
    default:
      break;
  }
#endif
  return {};
}

}  // namespace fastkv::FASTKV_ISA
