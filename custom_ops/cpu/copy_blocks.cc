// Block copies inside tensors: bytes only, whatever they mean.
#include <algorithm>
#include <memory>
#include <new>

#include "fastkv/launch.h"
#include "stream_copy.h"

namespace fastkv {

namespace {

using ll = long long;

constexpr int64_t kParallelBytes = 1 << 17;

Status check_ids(const BlocksView* tensors, int64_t num_tensors, const int64_t* ids, int64_t count, const char* what) {
  for (int64_t t = 0; t < num_tensors; ++t) {
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || ids[i] >= tensors[t].num_blocks) {
        return refuse(StatusCode::kOutOfRange, "%s[%lld] is block %lld, but tensor %lld has blocks 0 to %lld", what,
                      (ll)i, (ll)ids[i], (ll)t, (ll)(tensors[t].num_blocks - 1));
      }
    }
  }
  return {};
}

/// Copies run in any order and in parallel, so a destination may be nobody's source and nobody else's destination.
Status check_overlap(const int64_t* src_ids, const int64_t* dst_ids, int64_t count) {
  std::unique_ptr<int64_t[]> sorted(new (std::nothrow) int64_t[static_cast<size_t>(2 * count + 1)]);
  if (sorted == nullptr) return out_of_memory();
  int64_t* src = sorted.get();
  int64_t* dst = src + count;
  std::copy(src_ids, src_ids + count, src);
  std::copy(dst_ids, dst_ids + count, dst);
  std::sort(src, src + count);
  std::sort(dst, dst + count);
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && dst[i] == dst[i - 1]) {
      return refuse(StatusCode::kInvalidArgument, "block %lld is the destination of two copies", (ll)dst[i]);
    }
    if (std::binary_search(src, src + count, dst[i])) {
      return refuse(StatusCode::kInvalidArgument,
                    "block %lld is the source of one copy and the destination of another: do them in two calls",
                    (ll)dst[i]);
    }
  }
  return {};
}

}  // namespace

Status copy_blocks(const BlocksView* tensors, int64_t num_tensors, const int64_t* src_ids, const int64_t* dst_ids,
                   int64_t num_copies) {
  Status status = check_ids(tensors, num_tensors, src_ids, num_copies, "src_ids");
  if (status.ok()) status = check_ids(tensors, num_tensors, dst_ids, num_copies, "dst_ids");
  if (status.ok()) status = check_overlap(src_ids, dst_ids, num_copies);
  if (!status.ok()) return status;

  int64_t bytes = 0;
  for (int64_t t = 0; t < num_tensors; ++t) bytes += tensors[t].block_bytes * num_copies;
  const int64_t pieces = num_tensors * num_copies;
  const CopyBytes copy = stream_copy();
#pragma omp parallel if (bytes >= kParallelBytes)
  {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < pieces; ++i) {  // pair after pair: a thread that had all the scales would have little to do
      const BlocksView& tensor = tensors[i % num_tensors];
      const int64_t pair = i / num_tensors;
      copy(tensor.data + dst_ids[pair] * tensor.block_bytes, tensor.data + src_ids[pair] * tensor.block_bytes,
           tensor.block_bytes);
    }
    finish_stores();
  }
  return {};
}

}  // namespace fastkv
