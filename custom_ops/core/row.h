// Row<T>: a growable row of plain data, without the zeroing of std::vector::resize and with its capacity kept by
// clear().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

namespace fastkv::core {

template <typename T>
class Row {
  static_assert(std::is_trivially_copyable_v<T>, "Row moves its elements with memcpy");

 public:
  Row() = default;
  Row(const Row& other) { append(other.data(), other.size()); }
  Row& operator=(const Row& other) {
    if (this != &other) {
      clear();
      append(other.data(), other.size());
    }
    return *this;
  }
  ~Row() { std::free(data_); }

  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& back() { return data_[size_ - 1]; }
  const T& back() const { return data_[size_ - 1]; }

  // New elements have any value.
  void resize(int64_t size) {
    if (size > capacity_) grow(size);
    size_ = size;
  }
  void push_back(T value) {
    resize(size_ + 1);
    data_[size_ - 1] = value;
  }
  void append(const T* values, int64_t count) {
    const int64_t before = size_;
    resize(before + count);
    if (count) std::memcpy(data_ + before, values, static_cast<size_t>(count) * sizeof(T));
  }
  void pop_back() { --size_; }
  void clear() { size_ = 0; }

 private:
  void grow(int64_t size) {
    const int64_t capacity = size > 2 * capacity_ ? size : 2 * capacity_;
    void* fresh = std::realloc(static_cast<void*>(data_), static_cast<size_t>(capacity) * sizeof(T));
    if (!fresh) throw std::bad_alloc();
    data_ = static_cast<T*>(fresh);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  int64_t size_ = 0, capacity_ = 0;
};

}  // namespace fastkv::core
