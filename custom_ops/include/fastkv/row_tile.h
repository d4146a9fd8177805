// Walks a tile of few query rows over the cache with the kernels of rows.h: chunks of positions that fit the
// first-level cache, keys first, then values. While a chunk's keys are multiplied its values are fetched, and while its
// values are added the next chunk's keys are: block tables jump where no hardware prefetcher follows.
//
// A storage or row length without kernels, and queries that folding would spoil (infinite, or out of float32's range
// once scaled), go the plain way: each chunk is decoded to float32 first, then read by the float32 kernels.
#pragma once

#include "fastkv/attend.h"
#include "fastkv/dot_codes.h"
#include "fastkv/fold.h"
#include "fastkv/int4_rows.h"

namespace fastkv::FASTKV_ISA {

static_assert(byte_query_floats(kMaxKeyDim) <= kQueryStride, "a query as bytes takes the place of one in floats");

/// Positions a chunk: keys and values of a quarter to a half of a small first-level cache each (32 KiB). Measured: more
/// costs long rows, that wait for memory, and less costs short ones, that have work to do for every chunk.
static inline int64_t chunk_positions(int64_t row_bytes) {
  const int64_t bytes = row_bytes > 256 ? 8192 : 16384;
  return larger(16, smaller(kMaxChunk, bytes / larger(row_bytes, 1) / 8 * 8));
}

/// Rows of a chunk of positions, as pointers, and their dynamic scales. Pointers past `count` repeat the last one.
struct RowChunk {
  const char* keys[kMaxChunk + kLanes];
  const char* values[kMaxChunk + kLanes];
  alignas(64) float key_scale[kMaxChunk + kLanes];
  alignas(64) float value_scale[kMaxChunk + kLanes];
  int64_t begin = 0;
  int64_t count = 0;

  /// A step may begin anywhere, so up to kLanes - 1 pointers past the last one are read.
  void fill_up() {
    for (int64_t i = count; count > 0 && i < count + kLanes; ++i) {
      keys[i] = keys[count - 1];
      values[i] = values[count - 1];
    }
  }
};

struct RowScratch {
  int64_t dk, dv;  // padded to whole vectors
  float *natural, *q, *out, *result, *scores, *maximum, *sum, *scaled_sum, *factor, *constant, *shrink;
  float *key_scale, *key_zero, *value_scale, *value_zero, *value_unit, *value_carry, *value_offset, *value_factor;
  float *keys, *values;
  int32_t *key_order, *value_order;

  RowScratch(const AttentionParams& p, int64_t rows, Carver* carver) {
    dk = round_up(p.key.dim, kLanes);
    dv = round_up(p.out.dim, kLanes);
    natural = carver->take(rows * kQueryStride);
    q = carver->take(rows * kQueryStride);
    out = carver->take(rows * dv);
    result = carver->take(larger(dk, dv) + kLanes);
    scores = carver->take(kMaxChunk * 4 + kLanes);  // up to four lanes a position, and a last step
    for (float** state : {&maximum, &sum, &scaled_sum, &factor, &constant, &shrink})
      *state = carver->take(rows + kLanes);
    for (float** scale : {&key_scale, &key_zero}) *scale = carver->take(dk);
    for (float** x : {&value_unit, &value_carry, &value_offset, &value_factor}) *x = carver->take(dv);
    for (float** scale : {&value_scale, &value_zero}) *scale = carver->take(dk > dv ? dk : dv);
    key_order = reinterpret_cast<int32_t*>(carver->take(dk));
    value_order = reinterpret_cast<int32_t*>(carver->take(dv));
    keys = carver->take(kMaxChunk * dk);  // only of use without kernels
    values = carver->take(kMaxChunk * dv);
  }
};

/// Where each channel stands in lane order.
static inline void fill_lane_order(const RowKernels& kernels, int64_t dim, int32_t* order) {
  for (int64_t group = 0; group < dim; group += kernels.group_dim) {
    int64_t channel = group;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      for (int64_t v = 0; v < kernels.vecs && channel < dim; ++v, ++channel) {
        order[channel] = static_cast<int32_t>(group + kernels.vec_of[v] * kLanes + lane);
      }
    }
  }
}

/// Subnormal floats are values of float8: no thread may flush them to zero while such kernels run.
class KeepSubnormals {
 public:
#ifdef __AVX2__
  explicit KeepSubnormals(bool needed) : saved_(_mm_getcsr()) {
    if (needed) _mm_setcsr(saved_ & ~0x8040u);  // flush-to-zero and denormals-are-zero
  }
  ~KeepSubnormals() { _mm_setcsr(saved_); }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
  unsigned saved_;
#else
  explicit KeepSubnormals(bool) {}
  ~KeepSubnormals() {}
#endif
};

/// One tile's walk.
class RowTile {
 public:
  RowTile(const Tile& tile, Carver* carver) : tile_(tile), s_(tile.p, tile.rows, carver) {}

  void run() {
    begin(true);
    if (!walk()) {
      begin(false);
      walk();
    }
    for (int64_t row = 0; row < tile_.rows; ++row) finish(row);
  }

 private:
  /// Folds all positions into every row. False, and what was folded is of no use, if kernels met a code that they take
  /// for a number although it is none.
  bool walk() {
    const KeepSubnormals keep(keys_.is_tiny() || values_.is_tiny());
    const int64_t chunk = chunk_positions(direct_ ? tile_.p.key.row_bytes : s_.dk * 4);
    RowChunk chunks[2];
    int now = 0;
    prepare(&chunks[0], tile_.task.pos_begin, chunk);
    while (chunks[now].count > 0) {
      RowChunk& next = chunks[1 - now];
      prepare(&next, chunks[now].begin + chunks[now].count, chunk);
      if (!direct_) decode(&chunks[now]);
      if (attend(chunks[now], next)) return false;
      now = 1 - now;
    }
    return true;
  }

  /// Chooses kernels, folds scales into the queries, empties the soft-max state.
  void begin(bool direct) {
    const AttentionParams& p = tile_.p;
    key_scales_ = expand_scales(p.key, tile_.task.kv_head, s_.key_scale, s_.key_zero);
    value_scales_ = expand_scales(tile_.value, tile_.task.kv_head, s_.value_scale, s_.value_zero);
    keys_ = find_row_kernels(p.key.quant.storage, p.key.dtype, p.key.dim, tile_.table.fast_subnormals);
    values_ =
        find_row_kernels(tile_.value.quant.storage, tile_.value.dtype, tile_.value.dim, tile_.table.fast_subnormals);
    // the model's dtype is that of the results: what they are rounded to allows what the query is rounded to
    if (tile_.table.dot_products && p.out.dtype != ModelDtype::kFloat32) use_dots(p.key, &keys_);
    if (p.out.dtype == ModelDtype::kBFloat16) {
      use_int4_rows(p.key, 8.0f, &keys_);
      use_int4_rows(tile_.value, 0.0f, &values_);
    }
    direct_ = direct && keys_.score[0] != nullptr && values_.score[0] != nullptr;
    if (direct_ && keys_.operand_bytes == 0) fill_lane_order(keys_, p.key.dim, s_.key_order);
    if (direct_ && values_.operand_bytes == 0) fill_lane_order(values_, tile_.value.dim, s_.value_order);
    if (direct_ && values_.operand_bytes != 0) fill_int4_order(tile_.value.dim, s_.value_order);
    for (int64_t row = 0; row < tile_.rows; ++row) {
      float* q = s_.natural + row * kQueryStride;
      tile_.load_query(row, q);
      for (int64_t i = p.key.dim; i < s_.dk; ++i) q[i] = 0.0f;
      direct_ = direct_ && (keys_.operand_bytes != 0 ? fold_bytes(row, q) : fold_query(row, q));
      s_.maximum[row] = minus_infinity();
      s_.sum[row] = s_.scaled_sum[row] = 0.0f;
    }
    std::memset(s_.out, 0, static_cast<size_t>(tile_.rows * s_.dv) * sizeof(float));
    if (direct_) plan_finish();
    if (direct_ && values_.is_tiny()) weight_unit_ = static_cast<int>(smaller(96 - largest_value_scale(), 126));
    if (direct_) return;
    keys_ = values_ = row_kernels_of<Float32Lanes>(0.0f, 0);
    s_.q = s_.natural;
    weight_unit_ = 0;
    for (int64_t row = 0; row < tile_.rows; ++row) {
      s_.factor[row] = 1.0f;
      s_.constant[row] = 0.0f;
    }
    std::memset(s_.keys, 0, static_cast<size_t>(kMaxChunk * s_.dk) * sizeof(float));
    std::memset(s_.values, 0, static_cast<size_t>(kMaxChunk * s_.dv) * sizeof(float));
  }

  /// The query in lane order with the scales in it; false if that leaves what kernels can work with.
  bool fold_query(int64_t row, const float* natural) {
    float* q = s_.q + row * kQueryStride;
    double constant = 0.0;
    float largest = 0.0f;
    bool finite = true;
    if (tile_.p.key.quant.storage == Storage::kNone) {  // nothing to fold: any value will do
      for (int64_t i = 0; i < tile_.p.key.dim; ++i) q[s_.key_order[i]] = natural[i];
      s_.constant[row] = 0.0f;
      s_.factor[row] = 1.0f;
      return true;
    }
    for (int64_t i = 0; i < tile_.p.key.dim; ++i) {
      const float folded = key_scales_.scale == nullptr ? natural[i] : natural[i] * key_scales_.scale[i];
      const double zero = key_scales_.zero_point == nullptr ? 0.0 : key_scales_.zero_point[i];
      constant -= folded * (keys_.offset + zero);
      largest = std::fabs(folded) > largest ? std::fabs(folded) : largest;
      finite = finite && folded - folded == 0.0f;
      q[s_.key_order[i]] = folded;
    }
    s_.factor[row] = std::ldexp(1.0f, keys_.unit);
    if (keys_.carry_bits != 0) constant -= take_carry(q) * s_.factor[row];
    s_.constant[row] = static_cast<float>(constant);
    if (!finite || s_.constant[row] - s_.constant[row] != 0.0f) return false;
    if (!keys_.is_tiny()) return true;
    // lanes are tiny: bring the products back into the middle of float32's range
    const int exponent = largest == 0.0f ? 0 : std::ilogb(largest);
    const int shift = exponent < -30 ? 126 : 96 - exponent;
    float up[kMaxVecs];
    for (int v = 0; v < kMaxVecs; ++v) up[v] = std::ldexp(1.0f, shift - keys_.vec_unit[keys_.vec_of[v]]);
    const int64_t mask = keys_.vecs - 1;  // vecs is a power of two
    for (int64_t i = 0; i < tile_.p.key.dim; ++i) q[s_.key_order[i]] *= up[i & mask];
    s_.factor[row] = std::ldexp(1.0f, keys_.unit - shift);
    return exponent < 96;
  }

  /// The same with the query as bytes (byte_query.h).
  bool fold_bytes(int64_t row, const float* natural) {
    const int64_t dim = tile_.p.key.dim;
    float* folded = s_.result;
    double constant = 0.0;
    for (int64_t i = 0; i < dim; ++i) {
      folded[i] = key_scales_.scale == nullptr ? natural[i] : natural[i] * key_scales_.scale[i];
      if (key_scales_.zero_point != nullptr) constant -= static_cast<double>(folded[i]) * key_scales_.zero_point[i];
    }
    int8_t* bytes = reinterpret_cast<int8_t*>(s_.q + row * kQueryStride);
    const ByteQuery query = keys_.operand_bytes == kQueryBytes<4> ? query_to_bytes<4>(folded, dim, bytes)
                                                                  : query_to_bytes<8>(folded, dim, bytes);
    constant -= static_cast<double>(keys_.offset) * query.step * static_cast<double>(query.sum);
    s_.factor[row] = query.step;
    s_.constant[row] = static_cast<float>(constant);
    return query.is_usable && s_.constant[row] - s_.constant[row] == 0.0f;
  }

  /// What finish() needs of each channel:
  /// value = (lane sum * unit - left neighbour's * carry - offset * weights) * factor.
  void plan_finish() {
    float unit[kMaxVecs];
    for (int v = 0; v < kMaxVecs; ++v) unit[v] = std::ldexp(1.0f, -values_.vec_unit[values_.vec_of[v]]);
    for (int64_t i = 0; i < tile_.value.dim; ++i) {
      const bool has_neighbour = values_.carry_bits != 0 && (i & (values_.vecs - 1)) != 0;
      s_.value_unit[i] = unit[i & (values_.vecs - 1)];
      s_.value_carry[i] = has_neighbour ? std::ldexp(1.0f, -values_.carry_bits) : 0.0f;
      s_.value_offset[i] = values_.offset + (value_scales_.zero_point == nullptr ? 0.0f : value_scales_.zero_point[i]);
      s_.value_factor[i] = value_scales_.scale == nullptr ? 1.0f : value_scales_.scale[i];
    }
  }

  /// Takes from each channel's factor what the next channel's lane repeats of it; returns the sum of what is left,
  /// which the ones in the lanes add to every product.
  double take_carry(float* q) const {
    const float carry = std::ldexp(1.0f, -keys_.carry_bits);
    const int64_t mask = keys_.vecs - 1;  // vecs is a power of two
    double sum = 0.0;
    for (int64_t i = 0; i < tile_.p.key.dim; ++i) {
      if (((i + 1) & mask) != 0) q[s_.key_order[i]] -= q[s_.key_order[i + 1]] * carry;
      sum += q[s_.key_order[i]];
    }
    return sum;
  }

  /// Binary exponent of the largest dynamic scale that the tile's weights will be multiplied by; 0 without any.
  int largest_value_scale() const {
    if (tile_.value.quant.token_scale == nullptr) return 0;
    float largest = 0.0f;
    each_run(tile_, tile_.task.pos_begin, tile_.task.pos_end,
             [&](int64_t block, int64_t offset, int64_t count, int64_t) {
               const float* scale = tile_.value.token_scale(block, tile_.task.kv_head, offset);
               for (int64_t i = 0; i < count; ++i) largest = scale[i] > largest ? scale[i] : largest;
             });
    return largest > 0.0f && largest - largest == 0.0f ? std::ilogb(largest) : 0;
  }

  /// Pointers and scales of up to `chunk` positions from `begin`.
  void prepare(RowChunk* c, int64_t begin, int64_t chunk) const {
    c->begin = begin;
    c->count = larger(0, smaller(chunk, tile_.task.pos_end - begin));
    const int64_t head = tile_.task.kv_head;
    each_run(tile_, begin, begin + c->count, [&](int64_t block, int64_t offset, int64_t count, int64_t done) {
      const char* key = tile_.p.key.row(block, head, offset);
      const char* value = tile_.value.row(block, head, offset);
      for (int64_t i = done; i < done + count; ++i) {
        c->keys[i] = key;
        c->values[i] = value;
        key += tile_.p.key.row_bytes;
        value += tile_.value.row_bytes;
      }
      if (tile_.p.key.quant.token_scale == nullptr) return;
      const size_t bytes = static_cast<size_t>(count) * sizeof(float);
      std::memcpy(c->key_scale + done, tile_.p.key.token_scale(block, head, offset), bytes);
      std::memcpy(c->value_scale + done, tile_.value.token_scale(block, head, offset), bytes);
    });
    c->fill_up();
  }

  /// Replaces the chunk's pointers by pointers to decoded rows.
  void decode(RowChunk* c) const {
    const int64_t end = c->begin + c->count;
    decode_positions(tile_, tile_.p.key, c->begin, end, key_scales_, s_.keys, s_.dk);
    if (!tile_.p.value_in_key) decode_positions(tile_, tile_.value, c->begin, end, value_scales_, s_.values, s_.dv);
    for (int64_t i = 0; i < c->count; ++i) {
      c->keys[i] = reinterpret_cast<const char*>(s_.keys + i * s_.dk);
      c->values[i] = tile_.p.value_in_key ? c->keys[i] : reinterpret_cast<const char*>(s_.values + i * s_.dv);
    }
    c->fill_up();
  }

  /// Folds a chunk into every row, kMaxRows rows at a time; true if a NaN code was seen.
  bool attend(const RowChunk& c, const RowChunk& next) {
    const int64_t end = c.begin + c.count;
    bool is_first = true, has_nan_code = false;
    for (int64_t row = 0; row < tile_.rows;) {
      const int64_t low = larger(tile_.first(row), c.begin);
      const int64_t high = smaller(tile_.position(row) + 1, end);
      // rows of one token attend the same positions; without a window all tokens past the chunk do, too
      const bool whole = low == c.begin && high == end && tile_.p.window == 0;
      int64_t same = whole ? tile_.rows - row : (tile_.token(row) + 1) * tile_.group - (tile_.task.row_begin + row);
      same = smaller(same, tile_.rows - row);
      while (same > 0) {
        const int64_t rows = (same + (same + kMaxRows - 1) / kMaxRows - 1) / ((same + kMaxRows - 1) / kMaxRows);
        if (low < high) {
          has_nan_code |= attend_rows(c, next, row, rows, low - c.begin, high - c.begin, is_first);
          is_first = false;
        }
        row += rows;
        same -= rows;
      }
    }
    return has_nan_code;
  }

  bool attend_rows(const RowChunk& c, const RowChunk& next, int64_t row, int64_t rows, int64_t low, int64_t high,
                   bool fetches) {
    RowsJob job;
    job.keys = c.keys + low;
    job.values = c.values + low;
    fetches = fetches && direct_;
    job.ahead = fetches && !tile_.p.value_in_key ? c.values : job.keys;
    job.count = high - low;
    job.key_groups = ((direct_ ? tile_.p.key.dim : s_.dk) + keys_.group_dim - 1) / keys_.group_dim;
    job.value_vecs = (direct_ ? tile_.value.dim : s_.dv) / kLanes;
    job.key_bytes = tile_.p.key.row_bytes;
    job.q = s_.q + row * kQueryStride;
    job.scores = s_.scores;
    job.out = s_.out + row * s_.dv;
    job.out_stride = s_.dv;
    job.shrink = s_.shrink;
    job.sums = s_.sum + row;
    const bool key_has_nan = keys_.score[rows - 1](job);

    const bool has_token_scale = direct_ && tile_.p.key.quant.token_scale != nullptr;
    const FoldTerms terms{s_.factor + row, s_.constant + row, c.key_scale + low, c.value_scale + low,
                          std::ldexp(1.0f, weight_unit_)};
    const FoldState state{s_.maximum + row, s_.sum + row, s_.scaled_sum + row};
    kFoldRows[has_token_scale][rows - 1](s_.scores, job.count, terms, state, s_.shrink);

    job.ahead = next.keys;
    job.ahead_count = fetches ? next.count : 0;
    job.ahead_lines = (tile_.p.key.row_bytes + 63) / 64;
    return values_.add[rows - 1](job) || key_has_nan;
  }

  /// Undoes the values' folding and order, and hands the row over.
  void finish(int64_t row) const {
    float* out = s_.out + row * s_.dv;
    if (!direct_) return tile_.finish(row, out, s_.maximum[row], s_.sum[row]);
    const bool is_dynamic = tile_.value.quant.token_scale != nullptr;
    const double total = is_dynamic ? std::ldexp(double{s_.scaled_sum[row]}, -weight_unit_) : double{s_.sum[row]};
    const double unit = std::ldexp(1.0, values_.unit - weight_unit_);
    float* natural = s_.result + kLanes;  // with a place before it, for the first channel's left neighbour
    natural[-1] = 0.0f;
    for (int64_t i = 0; i < tile_.value.dim; ++i) natural[i] = out[s_.value_order[i]] * s_.value_unit[i];
    if (values_.carry_bits != 0) {  // not otherwise: nothing times an infinite neighbour is not nothing
      for (int64_t i = tile_.value.dim - 1; i >= 0; --i) {
        natural[i] = static_cast<float>((natural[i] - total) - (natural[i - 1] - total) * s_.value_carry[i]);
      }
    }
    for (int64_t i = 0; i < tile_.value.dim; ++i) {
      natural[i] = static_cast<float>((natural[i] * unit - s_.value_offset[i] * total) * s_.value_factor[i]);
    }
    tile_.finish(row, natural, s_.maximum[row], s_.sum[row]);
  }

  const Tile& tile_;
  RowScratch s_;
  RowScales key_scales_, value_scales_;
  RowKernels keys_, values_;
  bool direct_ = false;
  int weight_unit_ = 0;  // weights are multiplied by 2^weight_unit_, against tiny lanes
};

}  // namespace fastkv::FASTKV_ISA
