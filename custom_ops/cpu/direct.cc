// append_attention by plain pointers, for fastkv/ops/_direct.py: what Paddle's dispatch of a custom op with twenty
// arguments costs (60 to 80 us, 200 where a model's weights have just run through the caches) is most of a small decode
// call. The caller has checked what the op's binding checks; contents (ids, lengths, positions) are checked here as
// ever.
#include <cstdio>

#include "fastkv/launch.h"

namespace {

thread_local fastkv::Status last_status;

}  // namespace

extern "C" {

/// Both caches of a layer; value is unused for latents.
struct FastkvLayer {
  fastkv::CacheView key;
  fastkv::CacheView value;
};

/// Bytes of the structs that Python mirrors: 0 FastkvLayer, 1 BatchView, 2 RopeView.
__attribute__((visibility("default"))) int64_t fastkv_struct_bytes(int which) {
  const size_t sizes[] = {sizeof(FastkvLayer), sizeof(fastkv::BatchView), sizeof(fastkv::RopeView)};
  return which < 0 || which > 2 ? 0 : static_cast<int64_t>(sizes[which]);
}

/// rope and sinks may be null; v is null for latents, whose values are the first out_dim elements of a key. Returns a
/// StatusCode; what it means says fastkv_last_refusal, on the same thread.
__attribute__((visibility("default"))) int fastkv_attend(const FastkvLayer* layer, const fastkv::BatchView* batch,
                                                         const fastkv::RopeView* rope, const float* sinks, char* q,
                                                         char* k, char* v, char* out, int dtype, int64_t num_heads,
                                                         int64_t out_dim, float softmax_scale, int64_t window) {
  const auto model_dtype = static_cast<fastkv::ModelDtype>(dtype);
  fastkv::AttentionParams params;
  params.key = layer->key;
  params.q = {q, model_dtype, num_heads, params.key.dim};
  params.k = {k, model_dtype, params.key.kv_heads, params.key.dim};
  params.out = {out, model_dtype, num_heads, out_dim};
  if (v == nullptr) {
    params.value_in_key = true;
  } else {
    params.value = layer->value;
    params.v = {v, model_dtype, params.value.kv_heads, params.value.dim};
  }
  params.batch = *batch;
  if (rope != nullptr) params.rope = *rope;
  params.softmax_scale = softmax_scale;
  params.window = window;
  params.sinks = sinks;
  last_status = fastkv::append_attention(params);
  return static_cast<int>(last_status.code);
}

/// Why this thread's last call was refused.
__attribute__((visibility("default"))) const char* fastkv_last_refusal() { return last_status.message; }

}  // extern "C"
