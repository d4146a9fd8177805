// Checks of tensors and their translation into kernel parameters. Everything is refused here, before a kernel runs,
// with Paddle's own errors: they reach Python as ValueError and IndexError, while a std::exception would abort the
// process. Messages name both sides: what was expected and why, what was given.
#pragma once

#include <string>
#include <vector>

#include "fastkv/launch.h"
#include "paddle/phi/api/all.h"

namespace fastkv::binding {

using paddle::Tensor;
using OptionalTensor = paddle::optional<Tensor>;

[[noreturn]] inline void invalid(const std::string& message) {
  PADDLE_THROW(common::errors::InvalidArgument("%s", message));
}

/// Turns a launcher's refusal into Paddle's error.
inline void raise_if_refused(const Status& status) {
  switch (status.code) {
    case StatusCode::kOk:
      return;
    case StatusCode::kOutOfRange:
      PADDLE_THROW(common::errors::OutOfRange("%s", status.message));
    case StatusCode::kOutOfMemory:
      PADDLE_THROW(common::errors::ResourceExhausted("%s", status.message));
    default:
      invalid(status.message);
  }
}

/// Runs an op's body; whatever the standard library throws becomes a Paddle error.
template <typename Body>
auto guarded(Body body) -> decltype(body()) {
  std::string message;
  try {
    return body();
  } catch (const ::common::enforce::EnforceNotMet&) {
    throw;
  } catch (const ::common::PD_Exception&) {
    throw;
  } catch (const std::exception& error) {
    message = error.what();
  }
  PADDLE_THROW(common::errors::Fatal("unexpected error in a fastkv op: %s", message));
}

inline std::string dims_text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
  return text + "]";
}

/// For example "uint8 [8, 2, 16, 64]".
inline std::string describe(const Tensor& tensor) {
  return phi::DataTypeToString(tensor.dtype()) + " " + dims_text(tensor.shape());
}

/// Dense, initialised, on the CPU, of the rank; contiguous as far as an op can see (Paddle copies strided inputs
/// before a registered op runs, and an in-place result is then lost: the Python faces check the original).
inline void check_tensor(const Tensor& tensor, const char* name, size_t rank, const char* layout) {
  if (!tensor.has_allocation() && tensor.numel() != 0) invalid(std::string(name) + " has no memory; allocate it first");
  if (tensor.has_allocation() && !tensor.is_cpu()) {
    invalid(std::string(name) +
            " is not on the CPU, and this build of fastkv has CPU kernels only: move it with .cpu()");
  }
  if (static_cast<size_t>(tensor.dims().size()) != rank) {
    invalid(std::string(name) + " must be " + layout + ", but is " + describe(tensor));
  }
  if (!tensor.is_contiguous()) {
    invalid(std::string(name) + " is " + describe(tensor) + " with strides " +
            dims_text(common::vectorize(tensor.strides())) + ", not contiguous: call .contiguous() on it");
  }
}

inline void check_dtype(const Tensor& tensor, const char* name, phi::DataType dtype) {
  if (tensor.dtype() != dtype) {
    invalid(std::string(name) + " must be " + phi::DataTypeToString(dtype) + ", but is " + describe(tensor));
  }
}

inline void check_shape(const Tensor& tensor, const char* name, const std::vector<int64_t>& expected, const char* why) {
  if (tensor.shape() != expected) {
    invalid(std::string(name) + " must be " + dims_text(expected) + " (" + why + "), but is " + describe(tensor));
  }
}

inline const void* data_of(const Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.data(); }

/// Of rows: an empty tensor has no address, but its view must still say "present".
inline char* address(const Tensor& rows) {
  static char empty;
  return rows.numel() == 0 ? &empty : static_cast<char*>(const_cast<void*>(rows.data()));
}

template <typename T>
const T* data_as(const Tensor& tensor) {
  return static_cast<const T*>(data_of(tensor));
}

inline const Tensor* maybe(const OptionalTensor& tensor) { return tensor ? &*tensor : nullptr; }

inline ModelDtype model_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.dtype()) {
    case phi::DataType::FLOAT32:
      return ModelDtype::kFloat32;
    case phi::DataType::FLOAT16:
      return ModelDtype::kFloat16;
    case phi::DataType::BFLOAT16:
      return ModelDtype::kBFloat16;
    default:
      invalid(std::string(name) + " must be float32, float16 or bfloat16, but is " + describe(tensor));
  }
}

inline Storage parse_storage(const std::string& quant_type) {
  const Storage storage = find_storage(quant_type.c_str());
  if (storage == Storage::kCount) {
    std::string allowed;
    for (const StorageRow& row : kStorageTable) allowed += std::string(allowed.empty() ? "" : ", ") + row.name;
    invalid("unknown kv_cache_quant_type '" + quant_type + "'; allowed: " + allowed);
  }
  return storage;
}

/// Model rows [num_tokens, heads, dim].
RowsView view_rows(const Tensor& rows, const char* name);

/// What else a cache tensor comes with: static scale and zero point, or the dynamic scale role.
struct Scales {
  const Tensor* scale = nullptr;
  const Tensor* zero_point = nullptr;
};

/// One cache tensor [blocks, kv_heads, block_size, dim]; `what` is "key", "value" or "latent". An unquantised one may
/// have any model dtype.
CacheView view_cache(const Tensor& cache, const char* what, Storage storage, const Scales& scales);

/// An unquantised cache must be stored in the dtype of the rows that a call brings.
void check_stored_in(const CacheView& cache, const char* what, ModelDtype rows_dtype);

/// New rows must have the cache's heads and (logical) row length.
void check_rows_fit(const RowsView& rows, const char* rows_name, const CacheView& cache, const char* cache_name);

/// Value cache against key cache: same blocks, heads, block size.
void check_pair(const CacheView& key, const CacheView& value);

BatchView view_batch(const Tensor& block_tables, const Tensor& query_start, const Tensor& context_lens,
                     const Tensor& slot_mapping);

RopeView view_rope(const Tensor* cos, const Tensor* sin, const std::string& style);

const float* view_sinks(const Tensor* sinks, int64_t num_heads);

}  // namespace fastkv::binding
