// FlatArray<T>: a zero-initialised array of plain data that is large, flat, and never shrinks.
//
// Layout: one anonymous mapping, so the start is page-aligned, pages cost memory only once they are touched, and
// transparent huge pages keep TLB misses down when blocks of a large pool are visited in no order.
// Cost: grow_to copies what was there (doubling is the caller's business); everything else is an array access.
// Always holds: elements that nobody wrote are zero.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace fastkv::core {

template <typename T>
class FlatArray {
  static_assert(std::is_trivially_copyable_v<T>, "FlatArray moves its elements with memcpy");

 public:
  FlatArray() = default;
  explicit FlatArray(size_t count) { grow_to(count); }
  FlatArray(const FlatArray&) = delete;
  FlatArray& operator=(const FlatArray&) = delete;
  FlatArray(FlatArray&& other) noexcept { swap(other); }
  FlatArray& operator=(FlatArray&& other) noexcept {
    swap(other);
    return *this;
  }
  ~FlatArray() { unmap(); }

  size_t size() const { return count_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

  // Make room for count elements; pointers into the array become invalid.
  void grow_to(size_t count) {
    if (count <= count_) return;
    const size_t bytes = round_up(count * sizeof(T));
    void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (bytes >= kHugeBytes) ::madvise(fresh, bytes, MADV_HUGEPAGE);  // advice: refusal costs speed only
#endif
    if (count_) std::memcpy(fresh, static_cast<const void*>(data_), count_ * sizeof(T));
    unmap();
    data_ = static_cast<T*>(fresh);
    count_ = count;
    bytes_ = bytes;
  }

  // Make all elements zero again; gives the memory back.
  void clear() {
    const size_t count = count_;
    unmap();
    grow_to(count);
  }

 private:
  static constexpr size_t kHugeBytes = size_t{4} << 20;
  static size_t round_up(size_t bytes) { return (bytes + 4095) & ~size_t{4095}; }

  void swap(FlatArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(bytes_, other.bytes_);
  }

  void unmap() {
    if (data_) ::munmap(static_cast<void*>(data_), bytes_);
    data_ = nullptr;
    count_ = bytes_ = 0;
  }

  T* data_ = nullptr;
  size_t count_ = 0;
  size_t bytes_ = 0;
};

}  // namespace fastkv::core
