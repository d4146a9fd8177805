// The Paddle custom ops. Each checks its tensors (checks.h), unwraps them into kernel parameters and launches.
// Caches and dynamic scales are in-place inputs; out is the only fresh tensor. All ops run on the CPU, on the calling
// thread's stream of work: they return when the memory is written.
#include "attention.h"
#include "blocks.h"

namespace {

using fastkv::AttentionParams;
using fastkv::CacheView;
using fastkv::ModelDtype;
using fastkv::RowsView;
using fastkv::ScaleKind;
using fastkv::Storage;
using namespace fastkv::binding;  // NOLINT

using Dims = std::vector<int64_t>;
using OptionalDims = paddle::optional<Dims>;
using OptionalDtype = paddle::optional<paddle::DataType>;

std::vector<Tensor> append_attention(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& key_cache,
                                     Tensor& value_cache, OptionalTensor& key_scale, OptionalTensor& value_scale,
                                     const OptionalTensor& key_zero_point, const OptionalTensor& value_zero_point,
                                     const Tensor& block_tables, const Tensor& query_start, const Tensor& context_lens,
                                     const Tensor& slot_mapping, const OptionalTensor& rope_cos,
                                     const OptionalTensor& rope_sin, const OptionalTensor& sinks,
                                     const std::string& kv_cache_quant_type, float softmax_scale,
                                     const std::string& rope_style, int64_t window) {
  return guarded([&]() -> std::vector<Tensor> {
    AttentionParams params;
    view_layer({&key_cache, &value_cache, maybe(key_scale), maybe(value_scale), maybe(key_zero_point),
                maybe(value_zero_point)},
               parse_storage(kv_cache_quant_type), &params);
    params.batch = view_batch(block_tables, query_start, context_lens, slot_mapping);
    params.rope = view_rope(maybe(rope_cos), maybe(rope_sin), rope_style);
    params.softmax_scale = softmax_scale;
    params.window = window;
    return {attend(&params, q, k, v, maybe(sinks), nullptr)};
  });
}

std::vector<Dims> append_attention_shape(const Dims& q, const Dims& k, const Dims& v, const Dims& key_cache,
                                         const Dims& value_cache, const OptionalDims& key_scale,
                                         const OptionalDims& value_scale, const OptionalDims& key_zero_point,
                                         const OptionalDims& value_zero_point, const Dims& block_tables,
                                         const Dims& query_start, const Dims& context_lens, const Dims& slot_mapping,
                                         const OptionalDims& rope_cos, const OptionalDims& rope_sin,
                                         const OptionalDims& sinks) {
  if (q.size() != 3 || v.size() != 3) {
    invalid("q and v must be [num_tokens, heads, dim], but are " + dims_text(q) + " and " + dims_text(v));
  }
  return {{q[0], q[1], v[2]}};
}

std::vector<paddle::DataType> first_dtype(const std::vector<paddle::DataType>& inputs,
                                          const std::vector<std::vector<paddle::DataType>>&,
                                          const std::vector<paddle::any>&) {
  return {inputs.at(0)};
}

std::vector<Tensor> mla_append_attention(const Tensor& q, const Tensor& latent, Tensor& latent_cache,
                                         const OptionalTensor& latent_scale, const Tensor& block_tables,
                                         const Tensor& query_start, const Tensor& context_lens,
                                         const Tensor& slot_mapping, const std::string& kv_cache_quant_type,
                                         float softmax_scale, int64_t kv_lora_rank) {
  return guarded([&]() -> std::vector<Tensor> {
    AttentionParams params;
    view_layer({&latent_cache, nullptr, maybe(latent_scale)}, parse_storage(kv_cache_quant_type), &params);
    params.batch = view_batch(block_tables, query_start, context_lens, slot_mapping);
    params.softmax_scale = softmax_scale;
    return {attend_latent(&params, q, latent, kv_lora_rank)};
  });
}

std::vector<Dims> mla_append_attention_shape(const Dims& q, const Dims& latent, const Dims& latent_cache,
                                             const OptionalDims& latent_scale, const Dims& block_tables,
                                             const Dims& query_start, const Dims& context_lens,
                                             const Dims& slot_mapping, const std::string& kv_cache_quant_type,
                                             float softmax_scale, const int64_t& kv_lora_rank) {
  if (q.size() != 3) invalid("q must be [num_tokens, num_heads, dim], but is " + dims_text(q));
  return {{q[0], q[1], kv_lora_rank}};
}

void write_cache(const Tensor& k, const OptionalTensor& v, Tensor& key_cache, OptionalTensor& value_cache,
                 OptionalTensor& key_scale, OptionalTensor& value_scale, const OptionalTensor& key_zero_point,
                 const OptionalTensor& value_zero_point, const Tensor& slot_mapping,
                 const std::string& kv_cache_quant_type) {
  guarded([&] {
    const Storage storage = parse_storage(kv_cache_quant_type);
    const RowsView key_rows = view_rows(k, "k");
    const CacheView key = view_cache(key_cache, "key", storage, {maybe(key_scale), maybe(key_zero_point)});
    check_stored_in(key, "key", key_rows.dtype);
    check_rows_fit(key_rows, "k", key, "key_cache");
    RowsView value_rows;
    CacheView value;
    if (v && value_cache) {
      value_rows = view_rows(*v, "v");
      if (v->dtype() != k.dtype() || v->shape()[0] != k.shape()[0]) {
        invalid("k and v must have the same dtype and tokens, but k is " + describe(k) + ", v is " + describe(*v));
      }
      value = view_cache(*value_cache, "value", storage, {maybe(value_scale), maybe(value_zero_point)});
      check_stored_in(value, "value", key_rows.dtype);
      check_pair(key, value);
      check_rows_fit(value_rows, "v", value, "value_cache");
    } else if ((v || value_cache) && k.shape()[0] > 0) {  // Paddle passes an empty v as an absent one
      invalid("v and value_cache must be given together, or neither for a latent cache");
    }
    check_tensor(slot_mapping, "slot_mapping", 1, "int64 [num_tokens]");
    check_dtype(slot_mapping, "slot_mapping", phi::DataType::INT64);
    check_shape(slot_mapping, "slot_mapping", {k.shape()[0]}, "tokens of k");
    raise_if_refused(
        fastkv::write_cache(key_rows, value_rows, key, value, data_as<int64_t>(slot_mapping), k.shape()[0]));
  });
}

/// Dequantises into out, which must be float32 [slots, kv_heads, dim]; allocates it first if it is null.
std::vector<Tensor> gather(const Tensor& cache, const Tensor* scale, const Tensor* zero_point, const Tensor& slots,
                           Tensor* out, const std::string& kv_cache_quant_type, const std::string& what) {
  return guarded([&]() -> std::vector<Tensor> {
    const CacheView view = view_cache(cache, what.c_str(), parse_storage(kv_cache_quant_type), {scale, zero_point});
    check_tensor(slots, "slots", 1, "int64 [n]");
    check_dtype(slots, "slots", phi::DataType::INT64);
    const int64_t count = slots.shape()[0];
    Tensor fresh;
    if (out == nullptr) {
      fresh = paddle::empty({count, view.kv_heads, view.dim}, phi::DataType::FLOAT32, paddle::CPUPlace());
      out = &fresh;
    } else {
      check_tensor(*out, "out", 3, "float32 [n, kv_heads, dim]");
      check_dtype(*out, "out", phi::DataType::FLOAT32);
      check_shape(*out, "out", {count, view.kv_heads, view.dim}, "slots, kv_heads and row length of the cache");
    }
    raise_if_refused(
        fastkv::gather_cache(view, data_as<int64_t>(slots), count, const_cast<float*>(data_as<float>(*out))));
    if (fresh.defined()) return {fresh};
    return {};
  });
}

std::vector<Tensor> gather_cache(const Tensor& cache, const OptionalTensor& scale, const OptionalTensor& zero_point,
                                 const Tensor& slots, const std::string& kv_cache_quant_type, const std::string& what) {
  return gather(cache, maybe(scale), maybe(zero_point), slots, nullptr, kv_cache_quant_type, what);
}

void gather_cache_into(const Tensor& cache, const OptionalTensor& scale, const OptionalTensor& zero_point,
                       const Tensor& slots, Tensor& out, const std::string& kv_cache_quant_type,
                       const std::string& what) {
  gather(cache, maybe(scale), maybe(zero_point), slots, &out, kv_cache_quant_type, what);
}

std::vector<Dims> gather_cache_shape(const Dims& cache, const OptionalDims& scale, const OptionalDims& zero_point,
                                     const Dims& slots, const std::string& kv_cache_quant_type,
                                     const std::string& what) {
  if (cache.size() != 4 || slots.size() != 1) {
    invalid(what + "_cache must be [blocks, kv_heads, block_size, dim] and slots [n], but are " + dims_text(cache) +
            " and " + dims_text(slots));
  }
  const int per_byte = fastkv::storage_row(parse_storage(kv_cache_quant_type)).bits == 4 ? 2 : 1;
  return {{slots[0], cache[1], cache[3] < 0 ? cache[3] : cache[3] * per_byte}};
}

std::vector<paddle::DataType> float32_dtype(const std::vector<paddle::DataType>&,
                                            const std::vector<std::vector<paddle::DataType>>&,
                                            const std::vector<paddle::any>&) {
  return {paddle::DataType::FLOAT32};
}

void copy_blocks(std::vector<Tensor>& tensors, const Tensor& src_ids, const Tensor& dst_ids) {
  guarded([&] {
    std::vector<const Tensor*> pointers;
    for (const Tensor& tensor : tensors) pointers.push_back(&tensor);
    copy_tensors(pointers, src_ids, dst_ids);
  });
}

}  // namespace

PD_BUILD_OP(fastkv_append_attention)
    .Inputs({"q", "k", "v", "key_cache", "value_cache", paddle::Optional("key_scale"), paddle::Optional("value_scale"),
             paddle::Optional("key_zero_point"), paddle::Optional("value_zero_point"), "block_tables", "query_start",
             "context_lens", "slot_mapping", paddle::Optional("rope_cos"), paddle::Optional("rope_sin"),
             paddle::Optional("sinks")})
    .Outputs({"out", "key_cache_out", "value_cache_out", paddle::Optional("key_scale_out"),
              paddle::Optional("value_scale_out")})
    .Attrs({"kv_cache_quant_type: std::string", "softmax_scale: float", "rope_style: std::string", "window: int64_t"})
    .SetInplaceMap({{"key_cache", "key_cache_out"},
                    {"value_cache", "value_cache_out"},
                    {paddle::Optional("key_scale"), paddle::Optional("key_scale_out")},
                    {paddle::Optional("value_scale"), paddle::Optional("value_scale_out")}})
    .SetKernelFn(PD_KERNEL(append_attention))
    .SetInferShapeFn(PD_INFER_SHAPE(append_attention_shape))
    .SetInferDtypeFn(first_dtype);

PD_BUILD_OP(fastkv_mla_append_attention)
    .Inputs({"q", "latent", "latent_cache", paddle::Optional("latent_scale"), "block_tables", "query_start",
             "context_lens", "slot_mapping"})
    .Outputs({"out", "latent_cache_out"})
    .Attrs({"kv_cache_quant_type: std::string", "softmax_scale: float", "kv_lora_rank: int64_t"})
    .SetInplaceMap({{"latent_cache", "latent_cache_out"}})
    .SetKernelFn(PD_KERNEL(mla_append_attention))
    .SetInferShapeFn(PD_INFER_SHAPE(mla_append_attention_shape))
    .SetInferDtypeFn(first_dtype);

PD_BUILD_OP(fastkv_write_cache)
    .Inputs({"k", paddle::Optional("v"), "key_cache", paddle::Optional("value_cache"), paddle::Optional("key_scale"),
             paddle::Optional("value_scale"), paddle::Optional("key_zero_point"), paddle::Optional("value_zero_point"),
             "slot_mapping"})
    .Outputs({"key_cache_out", paddle::Optional("value_cache_out"), paddle::Optional("key_scale_out"),
              paddle::Optional("value_scale_out")})
    .Attrs({"kv_cache_quant_type: std::string"})
    .SetInplaceMap({{"key_cache", "key_cache_out"},
                    {paddle::Optional("value_cache"), paddle::Optional("value_cache_out")},
                    {paddle::Optional("key_scale"), paddle::Optional("key_scale_out")},
                    {paddle::Optional("value_scale"), paddle::Optional("value_scale_out")}})
    .SetKernelFn(PD_KERNEL(write_cache));

PD_BUILD_OP(fastkv_gather_cache)
    .Inputs({"cache", paddle::Optional("scale"), paddle::Optional("zero_point"), "slots"})
    .Outputs({"out"})
    .Attrs({"kv_cache_quant_type: std::string", "what: std::string"})
    .SetKernelFn(PD_KERNEL(gather_cache))
    .SetInferShapeFn(PD_INFER_SHAPE(gather_cache_shape))
    .SetInferDtypeFn(float32_dtype);

PD_BUILD_OP(fastkv_gather_cache_into)
    .Inputs({"cache", paddle::Optional("scale"), paddle::Optional("zero_point"), "slots", "out"})
    .Outputs({"out_out"})
    .Attrs({"kv_cache_quant_type: std::string", "what: std::string"})
    .SetInplaceMap({{"out", "out_out"}})
    .SetKernelFn(PD_KERNEL(gather_cache_into));

PD_BUILD_OP(fastkv_copy_blocks)
    .Inputs({paddle::Vec("tensors"), "src_ids", "dst_ids"})
    .Outputs({paddle::Vec("tensors_out")})
    .SetInplaceMap({{paddle::Vec("tensors"), paddle::Vec("tensors_out")}})
    .SetKernelFn(PD_KERNEL(copy_blocks));
