// Scratch memory of the calling thread, kept between calls: fresh pages would cost more than a decode step's
// arithmetic.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace fastkv {

class ThreadScratch {
 public:
  ThreadScratch() = default;
  ThreadScratch(const ThreadScratch&) = delete;
  ThreadScratch& operator=(const ThreadScratch&) = delete;
  ~ThreadScratch() { std::free(data_); }

  /// At least `floats` floats, 64-byte aligned, contents undefined; null if there is no memory. Valid until the next
  /// call on this thread.
  float* floats(int64_t floats) {
    if (floats > capacity_) {
      std::free(data_);
      const int64_t rounded = (floats + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(rounded) * sizeof(float)));
      capacity_ = data_ == nullptr ? 0 : rounded;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace fastkv
