#include "checks.h"

namespace fastkv::binding {

namespace {

/// "kv_cache_quant_type int8 stores uint8, but key_cache is bfloat16 [8, 2, 16, 64]: allocate it from CacheSpec".
[[noreturn]] void wrong_storage(const Tensor& cache, const std::string& name, Storage storage,
                                const std::string& stores) {
  invalid(std::string("kv_cache_quant_type ") + storage_row(storage).name + " stores " + stores + ", but " + name +
          " is " + describe(cache) + ": allocate it from CacheSpec");
}

void view_static(const Tensor* tensor, const std::string& name, Storage storage, bool wanted, const CacheView& cache,
                 const float** data, int64_t* head_stride, int64_t* channel_stride) {
  const std::string type = storage_row(storage).name;
  if (!wanted) {
    if (tensor != nullptr) invalid("kv_cache_quant_type " + type + " takes no " + name + ", but one was given");
    return;
  }
  const std::string legal = "float32 [" + std::to_string(cache.kv_heads * cache.dim) + "] (per channel) or [" +
                            std::to_string(cache.kv_heads) + "] (per head)";
  if (tensor == nullptr) {
    invalid("kv_cache_quant_type " + type + " needs " + name + ", " + legal + ", but none was given: calibrate first");
  }
  const bool per_channel = tensor->numel() == cache.kv_heads * cache.dim;
  if (tensor->dtype() != phi::DataType::FLOAT32 || tensor->shape().size() != 1 ||
      !(per_channel || tensor->numel() == cache.kv_heads)) {
    invalid("kv_cache_quant_type " + type + " needs " + name + ", " + legal + ", but it is " + describe(*tensor));
  }
  check_tensor(*tensor, name.c_str(), 1, legal.c_str());
  *data = data_as<float>(*tensor);
  *head_stride = per_channel ? cache.dim : 1;
  *channel_stride = per_channel ? 1 : 0;
}

void view_dynamic(const Tensor* tensor, const std::string& name, Storage storage, CacheView* cache) {
  const std::string type = storage_row(storage).name;
  const std::vector<int64_t> expected = {cache->num_blocks, cache->kv_heads, cache->block_size};
  const std::string legal = "float32 " + dims_text(expected);
  if (tensor == nullptr) {
    invalid("kv_cache_quant_type " + type + " keeps its scales in the cache: " + name + " must be " + legal +
            ", but none was given");
  }
  if (tensor->dtype() != phi::DataType::FLOAT32 || tensor->shape() != expected) {
    invalid("kv_cache_quant_type " + type + " keeps its scales in the cache: " + name + " must be " + legal +
            ", but is " + describe(*tensor) + ": allocate it from CacheSpec");
  }
  check_tensor(*tensor, name.c_str(), 3, legal.c_str());
  cache->quant.token_scale = const_cast<float*>(data_as<float>(*tensor));
}

}  // namespace

RowsView view_rows(const Tensor& rows, const char* name) {
  check_tensor(rows, name, 3, "[num_tokens, heads, dim]");
  RowsView view;
  view.dtype = model_dtype(rows, name);
  const phi::DDim& dims = rows.dims();
  view.heads = dims[1];
  view.dim = dims[2];
  if (view.heads < 1 || view.dim < 1 || view.dim > kMaxRowDim) {
    invalid(std::string(name) + " must have at least one head and a last dimension of 1 to " +
            std::to_string(kMaxRowDim) + ", but is " + describe(rows));
  }
  view.data = address(rows);
  return view;
}

CacheView view_cache(const Tensor& cache, const char* what, Storage storage, const Scales& scales) {
  const std::string name = std::string(what) + "_cache";
  const bool quantised = storage != Storage::kNone;
  if (quantised && cache.dtype() != phi::DataType::UINT8) wrong_storage(cache, name, storage, "uint8");
  check_tensor(cache, name.c_str(), 4, "[blocks, kv_heads, block_size, dim]");
  CacheView view;
  if (!quantised) {
    if (cache.dtype() == phi::DataType::UINT8) wrong_storage(cache, name, storage, "the model's dtype");
    view.dtype = model_dtype(cache, name.c_str());
  }
  const std::vector<int64_t> dims = cache.shape();
  const int64_t per_byte = storage_row(storage).bits == 4 ? 2 : 1;
  view.num_blocks = dims[0];
  view.kv_heads = dims[1];
  view.block_size = dims[2];
  view.dim = dims[3] * per_byte;
  if (dims[0] < 1 || dims[1] < 1 || dims[2] < 1 || dims[3] < 1 || view.dim > kMaxRowDim) {
    invalid(name + " must have at least one block, head, token and element, and rows of at most " +
            std::to_string(kMaxRowDim) + " elements, but is " + describe(cache));
  }
  view.row_bytes = stored_row_bytes(storage, view.dtype, view.dim);
  view.data = static_cast<char*>(const_cast<void*>(cache.data()));
  view.quant.storage = storage;

  const StorageRow& row = storage_row(storage);
  const std::string scale_name = std::string(what) + "_scale";
  int64_t zero_head_stride = 0;
  int64_t zero_channel_stride = 0;
  if (row.scales == ScaleKind::kDynamic) {
    view_dynamic(scales.scale, scale_name, storage, &view);
  } else {
    view_static(scales.scale, scale_name, storage, row.scales == ScaleKind::kStatic, view, &view.quant.scale,
                &view.quant.head_stride, &view.quant.channel_stride);
  }
  view_static(scales.zero_point, std::string(what) + "_zero_point", storage, row.has_zero_point, view,
              &view.quant.zero_point, &zero_head_stride, &zero_channel_stride);
  if (row.has_zero_point &&
      (zero_head_stride != view.quant.head_stride || zero_channel_stride != view.quant.channel_stride)) {
    invalid(scale_name + " is " + describe(*scales.scale) + ", but " + what + "_zero_point is " +
            describe(*scales.zero_point) + ": both must be per channel or both per head");
  }
  return view;
}

void check_stored_in(const CacheView& cache, const char* what, ModelDtype rows_dtype) {
  if (cache.quant.storage != Storage::kNone || cache.dtype == rows_dtype) return;
  invalid(std::string("kv_cache_quant_type none stores ") + dtype_name(rows_dtype) + ", but " + what + "_cache is " +
          dtype_name(cache.dtype) + " " + dims_text({cache.num_blocks, cache.kv_heads, cache.block_size, cache.dim}) +
          ": allocate it from CacheSpec");
}

void check_rows_fit(const RowsView& rows, const char* rows_name, const CacheView& cache, const char* cache_name) {
  if (rows.heads != cache.kv_heads || rows.dim != cache.dim) {
    invalid(std::string(rows_name) + " has " + std::to_string(rows.heads) + " heads of " + std::to_string(rows.dim) +
            ", but " + cache_name + " holds " + std::to_string(cache.kv_heads) + " heads of " +
            std::to_string(cache.dim) + " (kv_cache_quant_type " + storage_row(cache.quant.storage).name + ")");
  }
}

void check_pair(const CacheView& key, const CacheView& value) {
  if (key.num_blocks != value.num_blocks || key.kv_heads != value.kv_heads || key.block_size != value.block_size) {
    invalid("key_cache and value_cache must agree in blocks, kv_heads and block_size, but are " +
            dims_text({key.num_blocks, key.kv_heads, key.block_size}) + " and " +
            dims_text({value.num_blocks, value.kv_heads, value.block_size}));
  }
}

BatchView view_batch(const Tensor& block_tables, const Tensor& query_start, const Tensor& context_lens,
                     const Tensor& slot_mapping) {
  check_tensor(block_tables, "block_tables", 2, "int32 [batch, max_blocks]");
  check_tensor(query_start, "query_start", 1, "int32 [batch + 1]");
  check_tensor(context_lens, "context_lens", 1, "int32 [batch]");
  check_tensor(slot_mapping, "slot_mapping", 1, "int64 [num_tokens]");
  check_dtype(block_tables, "block_tables", phi::DataType::INT32);
  check_dtype(query_start, "query_start", phi::DataType::INT32);
  check_dtype(context_lens, "context_lens", phi::DataType::INT32);
  check_dtype(slot_mapping, "slot_mapping", phi::DataType::INT64);
  BatchView view;
  view.batch = block_tables.shape()[0];
  view.max_blocks = block_tables.shape()[1];
  view.num_tokens = slot_mapping.shape()[0];
  check_shape(query_start, "query_start", {view.batch + 1}, "batch + 1 of block_tables");
  check_shape(context_lens, "context_lens", {view.batch}, "batch of block_tables");
  view.block_tables = data_as<int32_t>(block_tables);
  view.query_start = data_as<int32_t>(query_start);
  view.context_lens = data_as<int32_t>(context_lens);
  view.slot_mapping = data_as<int64_t>(slot_mapping);
  return view;
}

RopeView view_rope(const Tensor* cos, const Tensor* sin, const std::string& style) {
  RopeView view;
  if (style != "neox" && style != "interleaved") {
    invalid("unknown rope style '" + style + "'; allowed: neox (rotate half), interleaved");
  }
  if ((cos == nullptr) != (sin == nullptr)) invalid("rope_cos and rope_sin must be given together or not at all");
  if (cos == nullptr) return view;
  check_tensor(*cos, "rope_cos", 2, "float32 [max_position, rotary_dim / 2]");
  check_dtype(*cos, "rope_cos", phi::DataType::FLOAT32);
  check_tensor(*sin, "rope_sin", 2, "float32 [max_position, rotary_dim / 2]");
  check_dtype(*sin, "rope_sin", phi::DataType::FLOAT32);
  check_shape(*sin, "rope_sin", cos->shape(), "the shape of rope_cos");
  view.max_position = cos->shape()[0];
  view.half = cos->shape()[1];
  view.interleaved = style == "interleaved";
  if (view.half < 1 || view.max_position < 1) invalid("rope_cos must not be empty, but is " + describe(*cos));
  view.cos = data_as<float>(*cos);
  view.sin = data_as<float>(*sin);
  return view;
}

const float* view_sinks(const Tensor* sinks, int64_t num_heads) {
  if (sinks == nullptr) return nullptr;
  check_tensor(*sinks, "sinks", 1, "float32 [num_heads]");
  check_dtype(*sinks, "sinks", phi::DataType::FLOAT32);
  check_shape(*sinks, "sinks", {num_heads}, "one logit a query head");
  return data_as<float>(*sinks);
}

}  // namespace fastkv::binding
