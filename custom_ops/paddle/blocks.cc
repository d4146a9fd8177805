#include "blocks.h"

#include <string>

#include "fastkv/launch.h"

namespace fastkv::binding {

void copy_tensors(const std::vector<const Tensor*>& tensors, const Tensor& src_ids, const Tensor& dst_ids) {
  std::vector<BlocksView> views;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = *tensors[i];
    const std::string name = "tensors[" + std::to_string(i) + "]";
    const std::vector<int64_t> dims = tensor.shape();
    if (dims.empty() || dims[0] < 1) {
      invalid(name + " must have at least one block in its first dimension, but is " + describe(tensor));
    }
    check_tensor(tensor, name.c_str(), dims.size(), "[blocks, ...]");
    const int64_t bytes = tensor.numel() / dims[0] * static_cast<int64_t>(phi::SizeOf(tensor.dtype()));
    views.push_back({static_cast<char*>(const_cast<void*>(data_of(tensor))), dims[0], bytes});
  }
  for (const auto* ids : {&src_ids, &dst_ids}) {
    const char* name = ids == &src_ids ? "src_ids" : "dst_ids";
    check_tensor(*ids, name, 1, "int64 [n]");
    check_dtype(*ids, name, phi::DataType::INT64);
  }
  check_shape(dst_ids, "dst_ids", src_ids.shape(), "the shape of src_ids");
  raise_if_refused(fastkv::copy_blocks(views.data(), static_cast<int64_t>(views.size()), data_as<int64_t>(src_ids),
                                       data_as<int64_t>(dst_ids), src_ids.shape()[0]));
}

}  // namespace fastkv::binding
