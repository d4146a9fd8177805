// Attention of one tile of query rows over the paged cache: the readable kernel, fast enough to be useful.
//
// A tile is up to kTileRows rows of one (request, kv head): row = (query token, head of the group). The loop goes over
// chunks of positions. Each chunk's K and V are decoded once into float32 scratch, for all rows of the tile (decode:
// the whole GQA group), then an online soft-max in float32 folds the chunk into each row's (maximum, sum, output).
//
// What always holds: a row reads only positions in [its window's start, its own position]; nothing else of a block is
// touched, and no masked position is multiplied by zero, so neither a recycled block's NaN nor a later token's can
// leak. A row whose scores are all -inf gives zeros.
// Scratch layout, each row padded to 8 floats with zeros: q [rows, dk], K [chunk, dk], V [chunk, dv], scores
// [rows, chunk], output [rows, dv], maximum [rows], sum [rows], expanded scales.
#pragma once

#include <cmath>
#include <cstring>

#include "fastkv/kernel_table.h"
#include "fastkv/vec.h"

namespace fastkv::FASTKV_ISA {

static inline float minus_infinity() { return -__builtin_inff(); }

/// Positions a chunk: K and V of a chunk should stay in the nearest caches.
static inline int64_t chunk_positions(int64_t dk, int64_t dv) { return dk + dv <= 160 ? 64 : dk + dv <= 320 ? 32 : 16; }

struct TileScratch {
  int64_t dk, dv, chunk;  // padded row lengths, positions a chunk
  float *q, *k, *v, *scores, *out, *maximum, *sum;
  float *key_scale, *key_zero, *value_scale, *value_zero;
  int64_t floats;

  TileScratch(const AttentionParams& p, int64_t rows, float* base) {
    dk = round_up(p.key.dim, kLanes);
    dv = round_up(p.out.dim, kLanes);
    chunk = chunk_positions(dk, p.value_in_key ? 0 : dv);
    const int64_t padded_rows = round_up(rows, kLanes);
    float* next = base;
    auto take = [&next](int64_t count) {
      float* start = next;
      next += round_up(count, 16);
      return start;
    };
    q = take(rows * dk);
    k = take(chunk * dk);
    v = p.value_in_key ? k : take(chunk * dv);
    scores = take(rows * chunk);
    out = take(rows * dv);
    maximum = take(padded_rows);
    sum = take(padded_rows);
    key_scale = take(dk);
    key_zero = take(dk);
    value_scale = take(dv);
    value_zero = take(dv);
    floats = next - base;
  }
};

static int64_t attend_scratch(const AttentionParams& p, int64_t rows) {
  static float origin[1];
  return TileScratch(p, rows, origin).floats;
}

/// One head's scales, a value a channel.
static inline RowScales expand_scales(const CacheView& cache, int64_t head, float* scale, float* zero) {
  const QuantView& quant = cache.quant;
  RowScales row;
  if (quant.scale != nullptr) {
    const float* first = quant.scale + head * quant.head_stride;
    for (int64_t i = 0; i < cache.dim; ++i) scale[i] = first[i * quant.channel_stride];
    row.scale = scale;
  }
  if (quant.zero_point != nullptr) {
    const float* first = quant.zero_point + head * quant.head_stride;
    for (int64_t i = 0; i < cache.dim; ++i) zero[i] = first[i * quant.channel_stride];
    row.zero_point = zero;
  }
  return row;
}

/// Decodes positions [begin, end) of one kv head into consecutive rows of out.
static inline void decode_positions(const CacheView& cache, DecodeRows decode, const int32_t* table, int64_t head,
                                    int64_t begin, int64_t end, const RowScales& scales, float* out, int64_t stride) {
  for (int64_t pos = begin; pos < end;) {
    const int64_t block = table[pos / cache.block_size];
    const int64_t offset = pos % cache.block_size;
    const int64_t left = cache.block_size - offset;
    const int64_t count = left < end - pos ? left : end - pos;
    decode(cache.row(block, head, offset), cache.row_bytes, count, cache.dim, scales,
           cache.token_scale(block, head, offset), out, stride);
    out += count * stride;
    pos += count;
  }
}

/// scores[r][c] = q[r] . k[c] for R rows and K keys; R * K independent sums hide the latency of the adder.
template <int R, int K>
static inline void dot_rows(const float* q, const float* k, int64_t dk, float* scores, int64_t scores_stride) {
  F8 acc[R][K];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < K; ++c) acc[r][c] = splat(0.0f);
  }
  for (int64_t i = 0; i < dk; i += kLanes) {
    F8 keys[K];
    for (int c = 0; c < K; ++c) keys[c] = lanes(k + c * dk + i);
    for (int r = 0; r < R; ++r) {
      const F8 query = lanes(q + r * dk + i);
      for (int c = 0; c < K; ++c) acc[r][c] += query * keys[c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < K; ++c) scores[r * scores_stride + c] = sum_lanes(acc[r][c]);
  }
}

/// out[r] += sum over c of p[r][c] * v[c], for R rows and K groups of 8 channels.
template <int R, int K>
static inline void add_values(const float* p, int64_t p_stride, const float* v, int64_t v_stride, int64_t count,
                              float* out, int64_t out_stride) {
  F8 acc[R][K];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < K; ++j) acc[r][j] = lanes(out + r * out_stride + j * kLanes);
  }
  for (int64_t c = 0; c < count; ++c) {
    F8 values[K];
    for (int j = 0; j < K; ++j) values[j] = lanes(v + c * v_stride + j * kLanes);
    for (int r = 0; r < R; ++r) {
      const F8 weight = splat(p[r * p_stride + c]);
      for (int j = 0; j < K; ++j) acc[r][j] += weight * values[j];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < K; ++j) lanes(out + r * out_stride + j * kLanes) = acc[r][j];
  }
}

/// Folds scores[low, high) of one row into its running maximum and sum; leaves the weights in place of the scores.
static inline void fold_softmax(float* scores, int64_t chunk, int64_t low, int64_t high, float* out, int64_t dv,
                                float* maximum, float* sum) {
  for (int64_t c = 0; c < low; ++c) scores[c] = minus_infinity();
  for (int64_t c = high; c < chunk; ++c) scores[c] = minus_infinity();
  F8 largest = splat(*maximum);
  for (int64_t c = 0; c < chunk; c += kLanes) {
    const F8 s = lanes(scores + c);
    const I8 larger = s > largest;
    largest = (F8)(((I8)s & larger) | ((I8)largest & ~larger));
  }
  const float new_maximum = max_lanes(largest);
  // with nothing but -inf so far, subtracting it would give NaN; 0 makes every weight 0
  const float base = new_maximum == minus_infinity() ? 0.0f : new_maximum;
  if (*maximum != base) {
    const float shrink = std::exp(*maximum - base);
    *sum *= shrink;
    for (int64_t i = 0; i < dv; i += kLanes) lanes(out + i) *= shrink;
  }
  F8 total = splat(0.0f);
  for (int64_t c = 0; c < chunk; c += kLanes) {
    const F8 weight = exp_nonpositive(lanes(scores + c) - base);
    lanes(scores + c) = weight;
    total += weight;
  }
  *sum += sum_lanes(total);
  *maximum = new_maximum;
}

/// R rows that attend the same positions [low, high) of the chunk.
template <int R>
static void attend_rows(const TileScratch& s, int64_t row, int64_t low, int64_t high, int64_t value_stride) {
  const float* q = s.q + row * s.dk;
  float* scores = s.scores + row * s.chunk;
  float* out = s.out + row * s.dv;
  int64_t c = low;
  for (; c + 2 <= high; c += 2) dot_rows<R, 2>(q, s.k + c * s.dk, s.dk, scores + c, s.chunk);
  if (c < high) dot_rows<R, 1>(q, s.k + c * s.dk, s.dk, scores + c, s.chunk);
  for (int r = 0; r < R; ++r) {
    fold_softmax(scores + r * s.chunk, s.chunk, low, high, out + r * s.dv, s.dv, s.maximum + row + r, s.sum + row + r);
  }
  const float* values = s.v + low * value_stride;
  int64_t i = 0;
  for (; i + 2 * kLanes <= s.dv; i += 2 * kLanes) {
    add_values<R, 2>(scores + low, s.chunk, values + i, value_stride, high - low, out + i, s.dv);
  }
  if (i < s.dv) add_values<R, 1>(scores + low, s.chunk, values + i, value_stride, high - low, out + i, s.dv);
}

/// Query rows as float32, rotated, times the soft-max scale; empty soft-max state.
static inline void load_tile(const AttentionParams& p, const KernelTable& table, const AttendTask& task, int64_t group,
                             const TileScratch& s) {
  const int64_t first_token = p.batch.query_start[task.request];
  const int64_t context = p.batch.context_lens[task.request];
  const LoadRow load = table.load_row[static_cast<int>(p.q.dtype)];
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    const int64_t i = row - task.row_begin;
    const int64_t token = row / group;
    const int64_t head = task.kv_head * group + row % group;
    float* q = s.q + i * s.dk;
    load(p.q.row(first_token + token, head), p.q.dim, q);
    for (int64_t c = p.q.dim; c < s.dk; ++c) q[c] = 0.0f;
    if (p.rope.cos != nullptr) {
      const int64_t at = (context + token) * p.rope.half;
      table.rotate_row(q, p.rope.cos + at, p.rope.sin + at, p.rope.half, p.rope.interleaved);
    }
    for (int64_t c = 0; c < p.q.dim; ++c) q[c] *= p.softmax_scale;
    // a sink is one more position with that score and a value of zero
    const float sink = p.sinks == nullptr ? minus_infinity() : p.sinks[head];
    s.maximum[i] = sink;
    s.sum[i] = sink == minus_infinity() ? 0.0f : 1.0f;
    std::memset(s.out + i * s.dv, 0, static_cast<size_t>(s.dv) * sizeof(float));
  }
}

/// Folds the decoded chunk that starts at position `begin` into every row of the tile.
static inline void attend_chunk(const AttentionParams& p, const AttendTask& task, int64_t group, int64_t begin,
                                int64_t end, const TileScratch& s) {
  const int64_t context = p.batch.context_lens[task.request];
  const int64_t value_stride = p.value_in_key ? s.dk : s.dv;
  const int64_t rows = task.row_end - task.row_begin;
  for (int64_t i = 0; i < rows;) {
    const int64_t token = (task.row_begin + i) / group;
    const int64_t pos = context + token;
    const int64_t start = p.window > 0 && pos + 1 > p.window ? pos + 1 - p.window : 0;
    const int64_t low = start > begin ? start - begin : 0;
    const int64_t high = (pos + 1 < end ? pos + 1 : end) - begin;
    // rows of one token share low and high; without a window all tokens past the chunk do, too
    const bool whole = low == 0 && pos + 1 >= end;
    int64_t same = whole && p.window == 0 ? rows - i : (token + 1) * group - (task.row_begin + i);
    same = same < rows - i ? same : rows - i;
    if (low < high) {
      int64_t done = 0;
      for (; done + 4 <= same; done += 4) attend_rows<4>(s, i + done, low, high, value_stride);
      if (same - done == 3) attend_rows<3>(s, i + done, low, high, value_stride);
      if (same - done == 2) attend_rows<2>(s, i + done, low, high, value_stride);
      if (same - done == 1) attend_rows<1>(s, i + done, low, high, value_stride);
    }
    i += same;
  }
}

static void attend_tile(const AttentionParams& p, const KernelTable& table, const AttendTask& task, float* scratch) {
  const int64_t group = p.q.heads / p.key.kv_heads;
  const int64_t rows = task.row_end - task.row_begin;
  const TileScratch s(p, rows, scratch);
  load_tile(p, table, task, group, s);
  // decoding never touches the padding columns: clear them once
  if (s.dk != p.key.dim) std::memset(s.k, 0, static_cast<size_t>(s.chunk * s.dk) * sizeof(float));
  if (!p.value_in_key && s.dv != p.value.dim) {
    std::memset(s.v, 0, static_cast<size_t>(s.chunk * s.dv) * sizeof(float));
  }

  const RowScales key_scales = expand_scales(p.key, task.kv_head, s.key_scale, s.key_zero);
  const RowScales value_scales =
      p.value_in_key ? RowScales{} : expand_scales(p.value, task.kv_head, s.value_scale, s.value_zero);
  const int32_t* blocks = p.batch.block_tables + task.request * p.batch.max_blocks;
  const int64_t context = p.batch.context_lens[task.request];
  const int64_t first_pos = context + task.row_begin / group;
  const int64_t end_pos = context + (task.row_end - 1) / group + 1;
  const int64_t start = p.window > 0 && first_pos + 1 > p.window ? first_pos + 1 - p.window : 0;
  const DecodeRows decode_key = table.decoder(p.key);
  const DecodeRows decode_value = p.value_in_key ? nullptr : table.decoder(p.value);
  for (int64_t begin = start; begin < end_pos; begin += s.chunk) {
    const int64_t end = begin + s.chunk < end_pos ? begin + s.chunk : end_pos;
    decode_positions(p.key, decode_key, blocks, task.kv_head, begin, end, key_scales, s.k, s.dk);
    if (!p.value_in_key) {
      decode_positions(p.value, decode_value, blocks, task.kv_head, begin, end, value_scales, s.v, s.dv);
    }
    attend_chunk(p, task, group, begin, end, s);
  }

  const int64_t first_token = p.batch.query_start[task.request];
  const StoreRow store = table.store_row[static_cast<int>(p.out.dtype)];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = task.row_begin + i;
    float* out = s.out + i * s.dv;
    const float weight = s.sum[i] == 0.0f ? 0.0f : 1.0f / s.sum[i];
    for (int64_t c = 0; c < p.out.dim; ++c) out[c] = s.sum[i] == 0.0f ? 0.0f : out[c] * weight;
    store(out, p.out.dim, p.out.row(first_token + row / group, task.kv_head * group + row % group));
  }
}

}  // namespace fastkv::FASTKV_ISA
