// Attention for many query rows: blocks of positions are decoded once into packed panels, then scores and results are
// matrix products of panels, six rows by sixteen columns at a time (twelve sums in registers, two vectors loaded and
// six numbers broadcast for every twelve multiply-adds).
//
//   queries  [block of 6 rows][dk][6]         packed once a tile
//   keys     [16 positions][dk][16]           transposed, so that a step over dk meets 16 neighbours
//   values   [16 channels][position][16]      so that a step over positions does
//   scores   [6 rows][kPanelKeys]             of one block of rows
#pragma once

#include "fastkv/attend.h"

namespace fastkv::FASTKV_ISA {

inline constexpr int64_t kBlockRows = kLanes == 16 ? 12 : 6;
inline constexpr int64_t kPanel = 2 * kLanes;
inline constexpr int64_t kPanelKeys = 64;  // positions a chunk at most

/// scores[r][0..kPanel) = q[r] . keys for R rows.
template <int R>
static void panel_scores(const float* q, const float* keys, int64_t dk, float* scores) {
  Floats sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = splat(0.0f);
  for (int64_t i = 0; i < dk; ++i, q += kBlockRows, keys += kPanel) {
    const Floats left = load(keys), right = load(keys + kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats query = splat(q[r]);
      sums[r][0] += query * left;
      sums[r][1] += query * right;
    }
  }
  for (int r = 0; r < R; ++r) {
    store(scores + r * kPanelKeys, sums[r][0]);
    store(scores + r * kPanelKeys + kLanes, sums[r][1]);
  }
}

/// out[r][0..kPanel) = out * shrink + weights . values over positions [begin, end) for R rows.
template <int R>
static void panel_values(const float* weights, const float* values, int64_t begin, int64_t end, const float* shrink,
                         float* out, int64_t out_stride) {
  Floats sums[R][2];
  for (int r = 0; r < R; ++r) {
    sums[r][0] = load(out + r * out_stride) * shrink[r];
    sums[r][1] = load(out + r * out_stride + kLanes) * shrink[r];
  }
  for (int64_t c = begin; c < end; ++c) {
    const Floats left = load(values + c * kPanel), right = load(values + c * kPanel + kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats weight = splat(weights[r * kPanelKeys + c]);
      sums[r][0] += weight * left;
      sums[r][1] += weight * right;
    }
  }
  for (int r = 0; r < R; ++r) {
    store(out + r * out_stride, sums[r][0]);
    store(out + r * out_stride + kLanes, sums[r][1]);
  }
}

/// Panel products for 1 to kBlockRows rows: [rows - 1].
struct PanelKernels {
  void (*scores[kBlockRows])(const float*, const float*, int64_t, float*);
  void (*values[kBlockRows])(const float*, const float*, int64_t, int64_t, const float*, float*, int64_t);

  template <int... R>
  constexpr explicit PanelKernels(std::integer_sequence<int, R...>)
      : scores{&panel_scores<R + 1>...}, values{&panel_values<R + 1>...} {}
};

/// Folds one row's scores into its maximum and sum: [begin, end), whole vectors, of which [low, high) count. Leaves
/// weights; returns the factor for what was summed before.
static FASTKV_INLINE float fold_row(float* scores, int64_t begin, int64_t end, int64_t low, int64_t high,
                                    float* maximum, float* sum) {
  for (int64_t c = begin; c < low; ++c) scores[c] = minus_infinity();
  for (int64_t c = high; c < end; ++c) scores[c] = minus_infinity();
  Floats top = splat(*maximum);
  for (int64_t c = begin; c < end; c += kLanes) top = max_each(load(scores + c), top);
  top = max_of_runs<kLanes>(top);
  const Floats base = select(top == splat(minus_infinity()), splat(0.0f), top);
  const float shrink = *maximum == base[0] ? 1.0f : std::exp(*maximum - base[0]);
  Floats total = splat(0.0f);
  for (int64_t c = begin; c < end; c += kLanes) {
    const Floats weight = exp_nonpositive(load(scores + c) - base);
    store(scores + c, weight);
    total += weight;
  }
  *sum = *sum * shrink + sum_of_runs<kLanes>(total)[0];
  *maximum = top[0];
  return shrink;
}

struct PanelScratch {
  int64_t dk, dv, blocks;
  float *q, *keys, *values, *scores, *out, *maximum, *sum, *row;
  float *key_scale, *key_zero, *value_scale, *value_zero;

  PanelScratch(const AttentionParams& p, int64_t rows, Carver* carver) {
    dk = round_up(p.key.dim, kLanes);
    dv = round_up(p.out.dim, kPanel);
    blocks = (rows + kBlockRows - 1) / kBlockRows;
    q = carver->take(blocks * kBlockRows * dk);
    keys = carver->take(kPanelKeys * dk);
    values = carver->take(kPanelKeys * dv);
    scores = carver->take(kBlockRows * kPanelKeys);
    out = carver->take(rows * dv);
    maximum = carver->take(rows);
    sum = carver->take(rows);
    row = carver->take(kLanes * larger(dk, dv));
    for (float** scale : {&key_scale, &key_zero}) *scale = carver->take(dk);
    for (float** scale : {&value_scale, &value_zero}) *scale = carver->take(larger(dk, dv));
  }
};

/// One tile's walk.
class PanelTile {
 public:
  PanelTile(const Tile& tile, Carver* carver) : tile_(tile), s_(tile.p, tile.rows, carver) {}

  void run() {
    begin();
    const int64_t chunk = s_.dk + s_.dv <= 640 ? kPanelKeys : kPanelKeys / 2;
    for (int64_t begin = tile_.task.pos_begin; begin < tile_.task.pos_end; begin += chunk) {
      const int64_t end = smaller(begin + chunk, tile_.task.pos_end);
      pack(begin, end);
      plan_fetch(end, smaller(end + chunk, tile_.task.pos_end));
      // rows of a block may attend different positions, and a weight of zero does not undo an infinite value
      const bool ragged = tile_.position(0) + 1 < end || tile_.first(tile_.rows - 1) > begin;
      const bool exact = !ragged || values_are_finite(end - begin);
      for (int64_t row = 0; row < tile_.rows; row += kBlockRows) attend_block(row, begin, end, exact);
    }
    for (int64_t row = 0; row < tile_.rows; ++row) {
      tile_.finish(row, s_.out + row * s_.dv, s_.maximum[row], s_.sum[row]);
    }
  }

 private:
  void begin() {
    const AttentionParams& p = tile_.p;
    key_scales_ = expand_scales(p.key, tile_.task.kv_head, s_.key_scale, s_.key_zero);
    value_scales_ = expand_scales(tile_.value, tile_.task.kv_head, s_.value_scale, s_.value_zero);
    std::memset(s_.q, 0, static_cast<size_t>(s_.blocks * kBlockRows * s_.dk) * sizeof(float));
    std::memset(s_.out, 0, static_cast<size_t>(tile_.rows * s_.dv) * sizeof(float));
    for (int64_t row = 0; row < tile_.rows; ++row) {
      tile_.load_query(row, s_.row);
      float* q = s_.q + row / kBlockRows * kBlockRows * s_.dk + row % kBlockRows;
      for (int64_t i = 0; i < p.key.dim; ++i) q[i * kBlockRows] = s_.row[i];
      s_.maximum[row] = minus_infinity();
      s_.sum[row] = 0.0f;
    }
    std::memset(s_.row, 0, static_cast<size_t>(kLanes * larger(s_.dk, s_.dv)) * sizeof(float));
  }

  void pack(int64_t begin, int64_t end) {
    // decoding writes no padding, and rows of values may have left something there
    if (tile_.p.key.dim != s_.dk) std::memset(s_.row, 0, static_cast<size_t>(kLanes * s_.dk) * sizeof(float));
    for (int64_t pos = begin; pos < end; pos += kLanes) {
      const int64_t count = smaller(kLanes, end - pos);
      decode_positions(tile_, tile_.p.key, pos, pos + count, key_scales_, s_.row, s_.dk);
      pack_keys(pos - begin, count);
      if (tile_.p.value_in_key) pack_values(pos - begin, count, s_.dk);
    }
    const int64_t padded = round_up(end - begin, kPanel);
    if (padded - (end - begin) >= kLanes) pack_keys(padded - kLanes, 0);
    if (tile_.p.value_in_key) return;
    for (int64_t pos = begin; pos < end; pos += kLanes) {
      const int64_t count = smaller(kLanes, end - pos);
      decode_positions(tile_, tile_.value, pos, pos + count, value_scales_, s_.row, s_.dv);
      pack_values(pos - begin, count, s_.dv);
    }
  }

  /// Decoded rows to columns [at, at + kLanes) of the key panels; columns past count are zero.
  void pack_keys(int64_t at, int64_t count) {
    float* panel = s_.keys + at / kPanel * kPanel * s_.dk + at % kPanel;
    for (int64_t i = 0; i < s_.dk; i += kLanes) {
      Floats square[kLanes];
      for (int64_t r = 0; r < kLanes; ++r) square[r] = r < count ? load(s_.row + r * s_.dk + i) : splat(0.0f);
      transpose(square);
      for (int64_t r = 0; r < kLanes; ++r) store(panel + (i + r) * kPanel, square[r]);
    }
  }

  void pack_values(int64_t at, int64_t count, int64_t stride) {
    for (int64_t r = 0; r < count; ++r) {
      const float* row = s_.row + r * stride;
      for (int64_t i = 0; i < s_.dv; i += kPanel) {
        float* to = s_.values + i * kPanelKeys + (at + r) * kPanel;
        store(to, load(row + i));
        store(to + kLanes, load(row + i + kLanes));
      }
    }
  }

  bool values_are_finite(int64_t count) const {
    Floats sum = splat(0.0f);
    for (int64_t i = 0; i < s_.dv; i += kPanel) {
      const float* panel = s_.values + i * kPanelKeys;
      for (int64_t c = 0; c < count * kPanel; c += kLanes) sum += load(panel + c) * 0.0f;
    }
    sum = sum_of_runs<kLanes>(sum);
    return sum[0] == 0.0f;
  }

  /// Spreads the fetching of the next chunk's rows over this chunk's panel products.
  void plan_fetch(int64_t begin, int64_t end) {
    fetch_pos_ = begin;
    fetch_end_ = end;
    const int64_t steps = s_.blocks;
    per_step_ = (end - begin + steps - 1) / steps;
  }

  void fetch_some() {
    const int64_t stop = smaller(fetch_pos_ + per_step_, fetch_end_);
    each_run(tile_, fetch_pos_, stop, [&](int64_t block, int64_t offset, int64_t count, int64_t) {
      const int64_t head = tile_.task.kv_head;
      const char* key = tile_.p.key.row(block, head, offset);
      for (int64_t i = 0; i < count * tile_.p.key.row_bytes; i += 64) __builtin_prefetch(key + i, 0, 2);
      if (tile_.p.value_in_key) return;
      const char* value = tile_.value.row(block, head, offset);
      for (int64_t i = 0; i < count * tile_.value.row_bytes; i += 64) __builtin_prefetch(value + i, 0, 2);
    });
    fetch_pos_ = stop;
  }

  void attend_block(int64_t row, int64_t begin, int64_t end, bool exact) {
    const int64_t rows = smaller(kBlockRows, tile_.rows - row);
    if (fetch_pos_ < fetch_end_) fetch_some();
    int64_t low[kBlockRows], high[kBlockRows], first = end - begin, last = 0;
    for (int64_t r = 0; r < rows; ++r) {
      low[r] = larger(tile_.first(row + r) - begin, 0);
      high[r] = smaller(tile_.position(row + r) + 1, end) - begin;
      first = smaller(first, low[r]);
      last = larger(last, high[r]);
    }
    if (first >= last) return;

    static constexpr PanelKernels kKernels{std::make_integer_sequence<int, kBlockRows>{}};
    const int64_t from = first / kPanel * kPanel, to = round_up(last, kPanel);
    for (int64_t c = from; c < to; c += kPanel) {
      kKernels.scores[rows - 1](s_.q + row * s_.dk, s_.keys + c * s_.dk, s_.dk, s_.scores + c);
    }
    float shrink[kBlockRows];
    for (int64_t r = 0; r < rows; ++r) {
      shrink[r] = low[r] >= high[r] ? 1.0f
                                    : fold_row(s_.scores + r * kPanelKeys, from, to, low[r], high[r],
                                               s_.maximum + row + r, s_.sum + row + r);
      if (low[r] >= high[r]) std::memset(s_.scores + r * kPanelKeys, 0, kPanelKeys * sizeof(float));
    }
    float* out = s_.out + row * s_.dv;
    for (int64_t i = 0; i < s_.dv; i += kPanel) {
      const float* values = s_.values + i * kPanelKeys;
      if (exact) {
        kKernels.values[rows - 1](s_.scores, values, first, last, shrink, out + i, s_.dv);
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        panel_values<1>(s_.scores + r * kPanelKeys, values, low[r], high[r], shrink + r, out + r * s_.dv + i, s_.dv);
      }
    }
  }

  const Tile& tile_;
  PanelScratch s_;
  RowScales key_scales_, value_scales_;
  int64_t fetch_pos_ = 0, fetch_end_ = 0, per_step_ = 0;
};

}  // namespace fastkv::FASTKV_ISA
