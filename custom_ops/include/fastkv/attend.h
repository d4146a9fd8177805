// The attention kernel: a tile of query rows of one (request, kv head) against some of the positions in the cache.
// Few rows go through rows.h, which reads stored bytes into registers; many rows through panels.h, which decodes each
// position once into packed panels and multiplies matrices. Both keep an online soft-max: the largest score so far,
// the sum of weights, and the weighted values, which shrink when the largest score grows.
//
// Nothing outside a row's own positions is ever multiplied, not even by zero: recycled blocks may hold NaN. (Codes of
// integers cannot: int4_rows.h multiplies neighbours by zero.)
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "fastkv/kernel_table.h"
#include "fastkv/vec.h"

namespace fastkv::FASTKV_ISA {

/// Hands out parts of a scratch buffer, each 64-byte aligned.
struct Carver {
  float* base;
  int64_t used = 0;
  float* take(int64_t floats) {
    float* start = base + used;
    used += round_up(floats, 16);
    return start;
  }
};

/// What every kernel wants to know of a task.
struct Tile {
  const AttentionParams& p;
  const KernelTable& table;
  const AttendTask& task;
  int64_t group;    // query heads a kv head
  int64_t rows;     // of this tile
  int64_t context;  // position of the request's query token 0
  const int32_t* blocks;
  CacheView value;  // params.value, or the key cache cut to its first out.dim channels

  Tile(const AttentionParams& params, const KernelTable& kernel_table, const AttendTask& attend_task)
      : p(params),
        table(kernel_table),
        task(attend_task),
        group(params.q.heads / params.key.kv_heads),
        rows(attend_task.row_end - attend_task.row_begin),
        context(params.batch.context_lens[attend_task.request]),
        blocks(params.batch.block_tables + attend_task.request * params.batch.max_blocks),
        value(params.value_in_key ? params.key : params.value) {
    value.dim = params.out.dim;
  }

  int64_t token(int64_t row) const { return (task.row_begin + row) / group; }
  int64_t head(int64_t row) const { return task.kv_head * group + (task.row_begin + row) % group; }
  int64_t position(int64_t row) const { return context + token(row); }
  /// First position that the row attends.
  int64_t first(int64_t row) const { return p.window > 0 ? larger(position(row) + 1 - p.window, 0) : 0; }

  /// The row's query as float32, rotated, times the soft-max scale.
  void load_query(int64_t row, float* q) const {
    const int64_t at_token = p.batch.query_start[task.request] + token(row);
    table.load_row[static_cast<int>(p.q.dtype)](p.q.row(at_token, head(row)), p.q.dim, q);
    if (p.rope.cos != nullptr) {
      const int64_t at = position(row) * p.rope.half;
      table.rotate_row(q, p.rope.cos + at, p.rope.sin + at, p.rope.half, p.rope.interleaved);
    }
    for (int64_t i = 0; i < p.q.dim; ++i) q[i] *= p.softmax_scale;
  }

  /// Stores a row's result: sums of weighted values, the largest score, the sum of weights. Changes out.
  void finish(int64_t row, float* out, float maximum, float sum) const {
    if (task.partial != nullptr) {
      float* partial = task.partial + row * partial_stride(p.out.dim);
      std::memcpy(partial, out, static_cast<size_t>(p.out.dim) * sizeof(float));
      partial += round_up(p.out.dim, 8);
      partial[0] = maximum;
      partial[1] = sum;
      return;
    }
    // a sink is one more position with that score and a value of zero
    const float sink = p.sinks == nullptr ? minus_infinity() : p.sinks[head(row)];
    const float top = sink > maximum ? sink : maximum;
    // with nothing but -inf, subtracting it would give NaN; 0 makes every weight 0
    const float base = top == minus_infinity() ? 0.0f : top;
    const float own = maximum == base ? 1.0f : std::exp(maximum - base);
    const float total = sum * own + (p.sinks == nullptr ? 0.0f : std::exp(sink - base));
    const float weight = own / total;
    for (int64_t i = 0; i < p.out.dim; ++i) out[i] = total == 0.0f ? 0.0f : out[i] * weight;
    const int64_t at_token = p.batch.query_start[task.request] + token(row);
    table.store_row[static_cast<int>(p.out.dtype)](out, p.out.dim, p.out.row(at_token, head(row)));
  }
};

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

/// Calls body(block, offset, count, done) for each run of positions [begin, end) inside one block.
template <typename Body>
static FASTKV_INLINE void each_run(const Tile& tile, int64_t begin, int64_t end, Body&& body) {
  if (begin >= end) return;
  const int64_t block_size = tile.p.key.block_size;
  const int32_t* block = tile.blocks + begin / block_size;  // the only division: they are slow, and blocks may be short
  int64_t offset = begin % block_size;
  for (int64_t pos = begin; pos < end; ++block, offset = 0) {
    const int64_t count = smaller(block_size - offset, end - pos);
    body(static_cast<int64_t>(*block), offset, count, pos - begin);
    pos += count;
  }
}

/// Decodes positions [begin, end) of the tile's kv head into consecutive rows of out.
static inline void decode_positions(const Tile& tile, const CacheView& cache, int64_t begin, int64_t end,
                                    const RowScales& scales, float* out, int64_t stride) {
  const DecodeRows decode = tile.table.decoder(cache);
  const int64_t head = tile.task.kv_head;
  each_run(tile, begin, end, [&](int64_t block, int64_t offset, int64_t count, int64_t done) {
    decode(cache.row(block, head, offset), cache.row_bytes, count, cache.dim, scales,
           cache.token_scale(block, head, offset), out + done * stride, stride);
  });
}

}  // namespace fastkv::FASTKV_ISA
