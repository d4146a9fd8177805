// Attention of one layer, as both ways in share it: the registered ops (ops.cc), and the Python functions that go
// around Paddle's dispatch (direct.cc). The callers fill in `params` what does not depend on the step's rows: caches,
// batch, rope, softmax_scale and window. Here rows, sinks and out are checked against them, and the kernels run.
#pragma once

#include "checks.h"

namespace fastkv::binding {

/// A layer's tensors: keys, values and what they are quantised with; absent ones are null. Without value: latents.
struct LayerTensors {
  const Tensor* key = nullptr;
  const Tensor* value = nullptr;
  const Tensor* key_scale = nullptr;
  const Tensor* value_scale = nullptr;
  const Tensor* key_zero_point = nullptr;
  const Tensor* value_zero_point = nullptr;
};

/// Checks a layer's caches and puts them into params.
void view_layer(const LayerTensors& tensors, Storage storage, AttentionParams* params);

/// q [num_tokens, num_heads, head_dim], k and v [num_tokens, kv_heads, dim] -> [num_tokens, num_heads, v_head_dim], in
/// `out` unless that is null.
Tensor attend(AttentionParams* params, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* sinks,
              const Tensor* out);

/// The same, of a token's queries, keys and values behind each other: [num_tokens, num_heads * head_dim + kv_heads *
/// (head_dim + v_head_dim)] -> [num_tokens, num_heads * v_head_dim].
Tensor attend_fused(AttentionParams* params, const Tensor& qkv, const Tensor* sinks, const Tensor* out);

/// Absorbed MLA: q [num_tokens, num_heads, dim], latent [num_tokens, dim] -> [num_tokens, num_heads, kv_lora_rank].
Tensor attend_latent(AttentionParams* params, const Tensor& q, const Tensor& latent, int64_t kv_lora_rank);

}  // namespace fastkv::binding
