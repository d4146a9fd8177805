// Block copies, as both ways in share them: the registered op (ops.cc), and the Python function that goes around
// Paddle's dispatch (direct.cc).
#pragma once

#include <vector>

#include "checks.h"

namespace fastkv::binding {

/// Checks tensors [blocks, ...] and ids int64 [n], then copies block src_ids[i] over block dst_ids[i] in each tensor.
void copy_tensors(const std::vector<const Tensor*>& tensors, const Tensor& src_ids, const Tensor& dst_ids);

}  // namespace fastkv::binding
