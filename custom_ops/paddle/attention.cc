#include "attention.h"

namespace fastkv::binding {

namespace {

/// Latents [num_tokens, dim] as rows of one head.
RowsView view_latents(const Tensor& latent) {
  check_tensor(latent, "latent", 2, "[num_tokens, kv_lora_rank + qk_rope_head_dim]");
  return {address(latent), model_dtype(latent, "latent"), 1, latent.dims()[1]};
}

void check_tokens(const AttentionParams& params, const Tensor& q, const char* name) {
  if (q.dims()[0] != params.batch.num_tokens) {
    invalid(std::string(name) + " must have the " + std::to_string(params.batch.num_tokens) +
            " tokens of slot_mapping, but is " + describe(q));
  }
}

void check_rope(const RopeView& rope, int64_t head_dim) {
  if (rope.cos != nullptr && 2 * rope.half > head_dim) {
    invalid("rope_cos has rows of " + std::to_string(rope.half) + ", so rotary_dim is " +
            std::to_string(2 * rope.half) + "; it must be from 2 to head_dim " + std::to_string(head_dim));
  }
}

bool overlap(const Tensor& a, const Tensor& b) {
  const char *from_a = address(a), *from_b = address(b);
  const int64_t bytes = static_cast<int64_t>(phi::SizeOf(a.dtype()));
  return from_a < from_b + b.numel() * bytes && from_b < from_a + a.numel() * bytes;
}

/// `given` if it has the dtype of q and these dimensions, or a new tensor if it is null.
Tensor result_tensor(const Tensor* given, const phi::DDim& dims, const Tensor& q,
                     std::initializer_list<const Tensor*> rows) {
  if (given == nullptr) return paddle::empty(common::vectorize(dims), q.dtype(), paddle::CPUPlace());
  if (given->dtype() != q.dtype() || given->dims() != dims) {
    invalid("out must be " + phi::DataTypeToString(q.dtype()) + " " + dims_text(common::vectorize(dims)) + ", but is " +
            describe(*given));
  }
  check_tensor(*given, "out", static_cast<size_t>(dims.size()), "the result's shape");
  for (const Tensor* tensor : rows) {
    if (overlap(*given, *tensor)) {
      invalid("out is the memory of q, k or v, which are read while it is written; give another tensor");
    }
  }
  return *given;
}

Tensor run(AttentionParams* params, Tensor out, int64_t out_dim) {
  params->out = {address(out), params->q.dtype, params->q.heads, out_dim};
  raise_if_refused(append_attention(*params));
  return out;
}

void check_has_value(const AttentionParams& params) {
  if (params.value_in_key) {
    invalid("append_attention needs a key and a value cache, but got a latent one: mla_append_attention");
  }
}

void check_common(AttentionParams* params, const Tensor* sinks) {
  check_stored_in(params->key, "key", params->q.dtype);
  check_stored_in(params->value, "value", params->q.dtype);
  if (params->window < 0) {
    invalid("window is " + std::to_string(params->window) + "; it must be 0 (none) or a number of positions");
  }
  check_rope(params->rope, params->key.dim);
  params->sinks = view_sinks(sinks, params->q.heads);
}

}  // namespace

void view_layer(const LayerTensors& tensors, Storage storage, AttentionParams* params) {
  if (tensors.value != nullptr) {
    params->key = view_cache(*tensors.key, "key", storage, {tensors.key_scale, tensors.key_zero_point});
    params->value = view_cache(*tensors.value, "value", storage, {tensors.value_scale, tensors.value_zero_point});
    check_pair(params->key, params->value);
    return;
  }
  const char* type = storage_row(storage).name;
  if (storage != Storage::kNone && storage != Storage::kFloat8E4M3) {
    invalid(std::string("kv_cache_quant_type ") + type +
            " is not supported with mla attention; allowed with mla: none, float8_e4m3fn");
  }
  params->value_in_key = true;
  params->key = view_cache(*tensors.key, "latent", storage, {tensors.key_scale, nullptr});
  if (params->key.kv_heads != 1) {
    invalid("latent_cache must be [blocks, 1, block_size, dim], but is " + describe(*tensors.key));
  }
  if (storage != Storage::kNone && tensors.key_scale->numel() != 1) {
    invalid(std::string("kv_cache_quant_type ") + type + " with mla needs one latent_scale, float32 [1], but it is " +
            describe(*tensors.key_scale));
  }
}

Tensor attend(AttentionParams* params, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* sinks,
              const Tensor* out) {
  check_has_value(*params);
  params->q = view_rows(q, "q");
  params->k = view_rows(k, "k");
  params->v = view_rows(v, "v");
  if (k.dtype() != q.dtype() || v.dtype() != q.dtype()) {
    invalid("q, k and v must have one dtype, but q is " + describe(q) + ", k is " + describe(k) + ", v is " +
            describe(v));
  }
  const int64_t num_tokens = q.dims()[0];
  if (k.dims()[0] != num_tokens || v.dims()[0] != num_tokens) {
    invalid("q, k and v must have the same tokens, but q is " + describe(q) + ", k is " + describe(k) + ", v is " +
            describe(v));
  }
  check_tokens(*params, q, "q");
  check_rows_fit(params->k, "k", params->key, "key_cache");
  check_rows_fit(params->v, "v", params->value, "value_cache");
  if (params->q.dim != params->key.dim || params->q.heads % params->key.kv_heads != 0) {
    invalid("q must have heads of " + std::to_string(params->key.dim) + ", in a multiple of " +
            std::to_string(params->key.kv_heads) + " kv_heads of key_cache, but is " + describe(q));
  }
  check_common(params, sinks);
  const phi::DDim dims = common::make_ddim({num_tokens, params->q.heads, params->value.dim});
  return run(params, result_tensor(out, dims, q, {&q, &k, &v}), params->value.dim);
}

Tensor attend_fused(AttentionParams* params, const Tensor& qkv, const Tensor* sinks, const Tensor* out) {
  check_has_value(*params);
  const CacheView &key = params->key, &value = params->value;
  check_tensor(qkv, "qkv", 2, "[num_tokens, num_heads * head_dim + kv_heads * (head_dim + v_head_dim)]");
  const ModelDtype dtype = model_dtype(qkv, "qkv");
  const int64_t width = qkv.dims()[1], kv_width = key.kv_heads * (key.dim + value.dim);
  const int64_t group = key.kv_heads * key.dim;  // elements of one query head for each kv head
  if (width <= kv_width || (width - kv_width) % group != 0) {
    invalid("qkv must have rows of n * " + std::to_string(group) + " + " + std::to_string(kv_width) +
            " elements, n query heads for each of the " + std::to_string(key.kv_heads) +
            " kv_heads of key_cache, but is " + describe(qkv));
  }
  check_tokens(*params, qkv, "qkv");
  const int64_t num_heads = (width - kv_width) / key.dim, bytes = dtype_bytes(dtype);
  char* const data = address(qkv);
  char* const k = data + num_heads * key.dim * bytes;
  params->q = {data, dtype, num_heads, key.dim, width};
  params->k = {k, dtype, key.kv_heads, key.dim, width};
  params->v = {k + group * bytes, dtype, key.kv_heads, value.dim, width};
  check_common(params, sinks);
  const phi::DDim dims = common::make_ddim({qkv.dims()[0], num_heads * value.dim});
  return run(params, result_tensor(out, dims, qkv, {&qkv}), value.dim);
}

Tensor attend_latent(AttentionParams* params, const Tensor& q, const Tensor& latent, int64_t kv_lora_rank) {
  if (!params->value_in_key) {
    invalid("mla_append_attention needs a latent cache, but got keys and values: append_attention");
  }
  params->q = view_rows(q, "q");
  params->k = view_latents(latent);
  if (latent.dtype() != q.dtype() || latent.dims()[0] != q.dims()[0]) {
    invalid("q and latent must have the same dtype and tokens, but q is " + describe(q) + ", latent is " +
            describe(latent));
  }
  check_tokens(*params, q, "q");
  check_stored_in(params->key, "latent", params->q.dtype);
  check_rows_fit(params->k, "latent", params->key, "latent_cache");
  if (params->q.dim != params->key.dim) {
    invalid("q must have heads of " + std::to_string(params->key.dim) + ", the row length of latent_cache, but is " +
            describe(q));
  }
  if (kv_lora_rank < 1 || kv_lora_rank > params->key.dim) {
    invalid("kv_lora_rank is " + std::to_string(kv_lora_rank) + "; it must be from 1 to the row length " +
            std::to_string(params->key.dim) + " of latent_cache");
  }
  const phi::DDim dims = common::make_ddim({q.dims()[0], params->q.heads, kv_lora_rank});
  return run(params, result_tensor(nullptr, dims, q, {}), kv_lora_rank);
}

}  // namespace fastkv::binding
