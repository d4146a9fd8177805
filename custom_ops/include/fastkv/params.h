// What kernels are called with: structs of pointers and 64-bit strides. No framework type appears here.
//
// Layout. A cache tensor is [blocks, kv_heads, block_size, dim]; rows are contiguous, all strides are in bytes. Token
// `pos` of a request lives in block block_tables[request][pos / block_size], row pos % block_size. A slot is
// block * block_size + row. Dynamic scales are float32 [blocks, kv_heads, block_size].
// Alignment: rows need none. Aliasing: a cache may alias nothing else that a call reads or writes, except that MLA
// reads its values from the key cache (value_in_key).
#pragma once

#include <cstdint>

#include "fastkv/storage.h"

namespace fastkv {

/// Longest row (head_dim, or kv_lora_rank + rope for MLA): rows are staged in stack buffers of this many floats.
inline constexpr int64_t kMaxRowDim = 1024;

/// Scales of one cache tensor. Static: element (head, channel) is at head * head_stride + channel * channel_stride
/// (per channel: head_dim and 1; per head: 1 and 0; per tensor: 0 and 0). Dynamic: token_scale, written with the codes.
struct QuantView {
  Storage storage = Storage::kNone;
  const float* scale = nullptr;
  const float* zero_point = nullptr;
  int64_t head_stride = 0;
  int64_t channel_stride = 0;
  float* token_scale = nullptr;
};

/// One cache tensor: keys, values or latents.
struct CacheView {
  char* data = nullptr;
  ModelDtype dtype = ModelDtype::kFloat32;  // of the elements, when not quantised
  int64_t num_blocks = 0;
  int64_t kv_heads = 0;
  int64_t block_size = 0;
  int64_t dim = 0;        // logical elements in a row
  int64_t row_bytes = 0;  // stored bytes of a row
  QuantView quant;

  FASTKV_INLINE int64_t head_bytes() const { return block_size * row_bytes; }
  FASTKV_INLINE int64_t block_bytes() const { return kv_heads * block_size * row_bytes; }
  FASTKV_INLINE char* row(int64_t block, int64_t head, int64_t offset) const {
    return data + block * block_bytes() + head * head_bytes() + offset * row_bytes;
  }
  FASTKV_INLINE float* token_scale(int64_t block, int64_t head, int64_t offset) const {
    return quant.token_scale == nullptr ? nullptr : quant.token_scale + (block * kv_heads + head) * block_size + offset;
  }
};

/// Rows of the model: [num_tokens, heads, dim], contiguous within a token. Queries, keys and values of a token may lie
/// behind each other in one tensor: then token_stride, in elements, is larger than heads * dim.
struct RowsView {
  char* data = nullptr;
  ModelDtype dtype = ModelDtype::kFloat32;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t token_stride = 0;  // 0: heads * dim

  FASTKV_INLINE char* row(int64_t token, int64_t head) const {
    const int64_t stride = token_stride == 0 ? heads * dim : token_stride;
    return data + (token * stride + head * dim) * dtype_bytes(dtype);
  }
};

/// Rotary tables, float32 [max_position, half] each; cos == nullptr means: already applied.
struct RopeView {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t max_position = 0;
  int64_t half = 0;          // rotary_dim / 2
  bool interleaved = false;  // pairs (2i, 2i+1) instead of (i, i + half)
};

/// A ragged batch. Request r owns tokens [query_start[r], query_start[r+1]); its token t sits at position
/// context_lens[r] + t. Tokens from query_start[batch] on are padding.
struct BatchView {
  int64_t batch = 0;
  int64_t num_tokens = 0;
  int64_t max_blocks = 0;
  const int32_t* block_tables = nullptr;  // [batch, max_blocks]
  const int32_t* query_start = nullptr;   // [batch + 1]
  const int32_t* context_lens = nullptr;  // [batch]
  const int64_t* slot_mapping = nullptr;  // [num_tokens], -1 = don't write
};

struct AttentionParams {
  RowsView q;
  RowsView k;  // k and v of MLA: k holds the latents, v is empty
  RowsView v;
  RowsView out;
  CacheView key;
  CacheView value;
  bool value_in_key = false;  // values are the first out.dim elements of each key row
  BatchView batch;
  RopeView rope;
  float softmax_scale = 1.0f;
  int64_t window = 0;            // attend the last `window` positions, own one included; 0 = all
  const float* sinks = nullptr;  // [num_heads] logits that join the soft-max denominator
};

}  // namespace fastkv
