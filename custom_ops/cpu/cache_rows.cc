// Moving rows into a cache and out of it: encode and scatter, gather and decode, split over OpenMP threads.
// Nothing inside a parallel region throws or allocates.
#include "cache_rows.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "checks.h"
#include "fastkv/kernel_table.h"
#include "fastkv/launch.h"
#include "stream_copy.h"

namespace fastkv {

namespace {

// Below this many elements, waking threads costs more than it saves.
constexpr int64_t kParallelElements = 1 << 14;

/// Scales of all heads of one cache tensor, a value a channel, with reciprocals for encoding.
class EncodeScales {
 public:
  /// False if there is no memory.
  bool expand(const CacheView& cache) {
    dim_ = cache.dim;
    const QuantView& quant = cache.quant;
    if (quant.scale == nullptr) return true;
    const int64_t count = cache.kv_heads * cache.dim;
    values_.reset(new (std::nothrow) float[static_cast<size_t>(3 * count)]);
    if (values_ == nullptr) return false;
    scale_ = values_.get();
    inverse_ = scale_ + count;
    zero_point_ = quant.zero_point == nullptr ? nullptr : inverse_ + count;
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
      for (int64_t i = 0; i < cache.dim; ++i) {
        const int64_t from = head * quant.head_stride + i * quant.channel_stride;
        const int64_t to = head * cache.dim + i;
        scale_[to] = quant.scale[from];
        inverse_[to] = 1.0f / quant.scale[from];
        if (zero_point_ != nullptr) zero_point_[to] = quant.zero_point[from];
      }
    }
    return true;
  }

  RowScales of_head(int64_t head) const {
    RowScales row;
    if (scale_ != nullptr) {
      row.scale = scale_ + head * dim_;
      row.inverse = inverse_ + head * dim_;
    }
    if (zero_point_ != nullptr) row.zero_point = zero_point_ + head * dim_;
    return row;
  }

 private:
  std::unique_ptr<float[]> values_;
  float* scale_ = nullptr;
  float* inverse_ = nullptr;
  float* zero_point_ = nullptr;
  int64_t dim_ = 0;
};

constexpr int64_t kLine = 64;

void prefetch_lines(const char* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(data + i);
}

/// How many of slots[i..end) lie one after the other in one block, the first included.
int64_t run_length(const int64_t* slots, int64_t i, int64_t end, int64_t block_size) {
  const int64_t most = std::min(end - i, block_size - slots[i] % block_size);
  int64_t count = 1;
  while (count < most && slots[i + count] == slots[i] + count) ++count;
  return count;
}

/// How rows of one tensor get into its cache.
struct RowWriter {
  const KernelTable& table;
  const RowsView& rows;
  const CacheView& cache;
  const EncodeScales& scales;
  const RopeView* rope;  // null for values, and for keys that are rotated already
  CopyBytes copy;        // of rows that stay as they are

  /// One head of `count` tokens from `token` on, into neighbouring slots of a block. positions: of tokens, for rotary;
  /// next_slot: of the token after them, or -1.
  void write_run(int64_t token, int64_t count, int64_t head, int64_t slot, int64_t next_slot,
                 const int64_t* positions) const {
    const int64_t block = slot / cache.block_size;
    const int64_t offset = slot % cache.block_size;
    char* dst = cache.row(block, head, offset);
    // what comes next: the next head of the same tokens, or the first of those after them
    const int64_t src_bytes = rows.dim * dtype_bytes(rows.dtype);
    int64_t fetch_src = src_bytes, fetch_dst = cache.head_bytes();
    if (head + 1 == rows.heads) {
      fetch_src = next_slot < 0 ? 0 : rows.row(token + count, 0) - rows.row(token, head);
      fetch_dst = next_slot < 0 ? 0 : cache.row(next_slot / cache.block_size, 0, next_slot % cache.block_size) - dst;
    }
    float* token_scale = cache.token_scale(block, head, offset);
    const bool is_plain = cache.quant.storage == Storage::kNone;
    const EncodeRows* encode = table.encode_rows[static_cast<int>(cache.quant.storage)];
    const RowScales by = scales.of_head(head);
    if (rope == nullptr && !is_plain) {
      encode[static_cast<int>(rows.dtype)](rows.row(token, head), rows.row(1, 0) - rows.row(0, 0), count, rows.dim, dst,
                                           by, token_scale, fetch_src, fetch_dst);
      return;
    }
    for (int64_t i = 0; i < count; ++i, dst += cache.row_bytes) {
      const char* src = rows.row(token + i, head);
      prefetch_lines(src + fetch_src, src_bytes);
      if (rope == nullptr && rows.dtype == cache.dtype) {
        copy(dst, src, cache.row_bytes);
        continue;
      }
      alignas(kLine) float x[kMaxRowDim];
      table.load_row[static_cast<int>(rows.dtype)](src, rows.dim, x);
      if (rope != nullptr) {
        const int64_t at = positions[token + i] * rope->half;
        table.rotate_row(x, rope->cos + at, rope->sin + at, rope->half, rope->interleaved);
      }
      if (is_plain) {
        table.store_row[static_cast<int>(cache.dtype)](x, cache.dim, dst);
      } else {
        encode[0](reinterpret_cast<const char*>(x), 0, 1, cache.dim, dst, by,
                  token_scale == nullptr ? nullptr : token_scale + i, 0, fetch_dst);
      }
    }
  }
};

void copy_cached(char* dst, const char* src, int64_t n) { std::memcpy(dst, src, static_cast<size_t>(n)); }

// Tokens whose rows of one head are written one after the other: in a block they are neighbours.
constexpr int64_t kWriteTokens = 16;
// From this many elements on, rows are stored past the caches, as memcpy does: no line is read that is then
// overwritten.
constexpr int64_t kStreamedElements = 1 << 20;

/// How rows of one tensor get out of its cache.
struct Gatherer {
  const CacheView& cache;
  const EncodeScales& scales;
  DecodeRows decode;
  float* out;

  /// Reads slots[i] and those after it that lie beside it in its block, up to `end`; returns how many.
  int64_t read_run(const int64_t* slots, int64_t i, int64_t end) const {
    const int64_t block = slots[i] / cache.block_size, offset = slots[i] % cache.block_size;
    const int64_t count = run_length(slots, i, end, cache.block_size);
    const int64_t stride = cache.kv_heads * cache.dim;
    for (int64_t head = 0; head < cache.kv_heads; ++head) {
      const char* from = cache.row(block, head, offset);
      if (head + 1 < cache.kv_heads) prefetch_lines(from + cache.head_bytes(), count * cache.row_bytes);
      decode(from, cache.row_bytes, count, cache.dim, scales.of_head(head), cache.token_scale(block, head, offset),
             out + i * stride + head * cache.dim, stride);
    }
    return count;
  }
};

}  // namespace

Status write_rows(const RowsView& k, const RowsView& v, const CacheView& key, const CacheView& value,
                  const int64_t* slots, int64_t num_tokens, const RopeView& rope, const int64_t* positions) {
  EncodeScales key_scales, value_scales;
  const bool has_value = v.data != nullptr;
  if (!key_scales.expand(key) || (has_value && !value_scales.expand(value))) return out_of_memory();
  const KernelTable& table = kernels();
  const int64_t elements = num_tokens * k.heads * (key.dim + (has_value ? value.dim : 0));
  const CopyBytes copy = elements >= kStreamedElements ? stream_copy() : copy_cached;
  const RowWriter keys{table, k, key, key_scales, rope.cos == nullptr ? nullptr : &rope, copy};
  const RowWriter values{table, v, value, value_scales, nullptr, copy};
  const int64_t groups = (num_tokens + kWriteTokens - 1) / kWriteTokens;
  const auto write_group = [&](int64_t group) {
    const int64_t end = std::min((group + 1) * kWriteTokens, num_tokens);
    int64_t count = 1;
    for (int64_t token = group * kWriteTokens; token < end; token += count) {
      count = slots[token] < 0 ? 1 : run_length(slots, token, end, key.block_size);
      const int64_t next_slot = token + count < num_tokens ? slots[token + count] : -1;
      for (int64_t head = 0; slots[token] >= 0 && head < k.heads; ++head) {
        keys.write_run(token, count, head, slots[token], next_slot, positions);
        if (has_value) values.write_run(token, count, head, slots[token], next_slot, nullptr);
      }
    }
  };
  if (elements < kParallelElements) {  // `omp parallel if` would cost 10 us in the runtime's code for one thread
    for (int64_t group = 0; group < groups; ++group) write_group(group);
  } else {
#pragma omp parallel
    {
#pragma omp for schedule(static) nowait
      for (int64_t group = 0; group < groups; ++group) write_group(group);
      finish_stores();
    }
  }
  return {};
}

Status write_cache(const RowsView& k, const RowsView& v, const CacheView& key, const CacheView& value,
                   const int64_t* slots, int64_t num_tokens) {
  const Status status = check_slots(slots, num_tokens, key, -1);
  if (!status.ok()) return status;
  return write_rows(k, v, key, value, slots, num_tokens, RopeView{}, nullptr);
}

Status gather_cache(const CacheView& cache, const int64_t* slots, int64_t num_slots, float* out) {
  const Status status = check_slots(slots, num_slots, cache, 0);
  if (!status.ok()) return status;
  EncodeScales scales;
  if (!scales.expand(cache)) return out_of_memory();
  const bool parallel = num_slots * cache.kv_heads * cache.dim >= kParallelElements;
  // what is read soon, by few tokens' call, should stay in the CPU's caches
  const bool streams = parallel && reinterpret_cast<uintptr_t>(out) % kLine == 0 && cache.dim % 16 == 0;
  const Gatherer gatherer{cache, scales, kernels().decoder(cache, streams), out};
  const int64_t groups = (num_slots + kWriteTokens - 1) / kWriteTokens;
#pragma omp parallel if (parallel)
  {
#pragma omp for schedule(static) nowait
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t end = std::min((group + 1) * kWriteTokens, num_slots);
      for (int64_t i = group * kWriteTokens; i < end;) i += gatherer.read_run(slots, i, end);
    }
    finish_stores();
  }
  return {};
}

}  // namespace fastkv
