// One table of function pointers for each instruction set. The sources behind it are compiled once a set, each in a
// namespace of its own, so that no inline function compiled for AVX2 can be merged into code for older CPUs.
#pragma once

#include <cstdint>

#include "fastkv/params.h"

namespace fastkv {

/// Scales of one head's row, expanded to a value a channel; null where the storage has none.
struct RowScales {
  const float* scale = nullptr;
  const float* inverse = nullptr;  // 1 / scale, only needed to encode
  const float* zero_point = nullptr;
};

/// Encodes `count` rows of n elements of the model, src_stride bytes apart, into neighbouring rows of a cache; a
/// dynamic storage writes their scales to token_scale. Meanwhile it fetches what comes next, for block tables jump
/// where no hardware prefetcher follows: what lies fetch_src and fetch_dst bytes behind src and dst (0: nothing).
using EncodeRows = void (*)(const char* src, int64_t src_stride, int64_t count, int64_t n, char* dst,
                            const RowScales& scales, float* token_scale, int64_t fetch_src, int64_t fetch_dst);

/// Decodes `count` rows that lie row_bytes apart into out, out_stride floats apart. token_scale: count values, or null.
using DecodeRows = void (*)(const char* src, int64_t row_bytes, int64_t count, int64_t n, const RowScales& scales,
                            const float* token_scale, float* out, int64_t out_stride);

/// Model dtype <-> float32.
using LoadRow = void (*)(const char* src, int64_t n, float* out);
using StoreRow = void (*)(const float* x, int64_t n, char* dst);

/// Rotates x in place by the angles of one position.
using RotateRow = void (*)(float* x, const float* cos, const float* sin, int64_t half, bool interleaved);

/// A piece of work: a tile of query rows of one (request, kv head), over some of the positions that they attend. Row i
/// is query token i / group, head kv_head * group + i % group.
struct AttendTask {
  int64_t request;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;
  int64_t pos_begin;
  int64_t pos_end;
  float* partial;  // null: the tile's only piece, results go to params.out; else see partial_stride
};

/// A piece's result, a row: round_up(out.dim, 8) unnormalised sums, then the largest score and the sum of weights.
FASTKV_INLINE int64_t partial_stride(int64_t out_dim) { return (out_dim + 7) / 8 * 8 + 8; }

struct KernelTable {
  /// Whether multiply-adds of subnormal numbers cost no more than others. So on AMD's Zen (measured on Zen 1: 0.40 ns
  /// either way); Intel's cores take some hundred cycles for each.
  bool fast_subnormals = false;
  /// Whether scores of integer codes are sums of integers, by VNNI (dot_codes.h).
  bool dot_products = false;
  EncodeRows encode_rows[kStorageCount][3];  // by ModelDtype of the rows; kNone has none: see store_row
  DecodeRows decode_rows[2][kStorageCount];  // 1: stores past the caches, if `out` and its rows are 32-byte aligned
  DecodeRows decode_model_rows[2][3];        // by ModelDtype, for Storage::kNone; likewise
  LoadRow load_row[3];
  StoreRow store_row[3];
  RotateRow rotate_row;
  /// Query rows of a tile at most: what keeps a tile's scratch in the second-level cache.
  int64_t (*tile_rows)(const AttentionParams& params);
  /// Floats of scratch that attend_piece needs for a tile of `rows` rows; 64-byte aligned.
  int64_t (*attend_scratch)(const AttentionParams& params, int64_t rows);
  void (*attend_piece)(const AttentionParams& params, const KernelTable& table, const AttendTask& task, float* scratch);
  /// Combines the `pieces` partial results of a tile, which lie one after the other at task.partial.
  void (*merge_pieces)(const AttentionParams& params, const KernelTable& table, const AttendTask& task, int64_t pieces,
                       float* scratch);

  FASTKV_INLINE DecodeRows decoder(const CacheView& cache, bool streams = false) const {
    return cache.quant.storage == Storage::kNone ? decode_model_rows[streams][static_cast<int>(cache.dtype)]
                                                 : decode_rows[streams][static_cast<int>(cache.quant.storage)];
  }
};

/// The table of the instruction set in use.
const KernelTable& kernels();

}  // namespace fastkv
