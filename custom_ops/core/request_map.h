// RequestMap: the open requests by id.
//
// Layout: requests live in chunks that never move, so a Request* stays good while the request is open; a HashTable maps
// the hash of the id to its place. Looking a request up touches one table slot and the request's own first line, where
// its id is. Places of erased requests are used again, last one first, with their buffers' capacity kept. Cost: O(1)
// expected. Memory is that of the largest number of requests that were open at once.
#pragma once

#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "hash.h"
#include "hash_table.h"
#include "request.h"
#include "row.h"

namespace fastkv::core {

class RequestMap {
 public:
  RequestMap() { grow(); }

  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  // nullptr when the id is not open.
  Request* find(std::string_view id) {
    const NodeId place = table_.find(hash(id), [&](NodeId other) { return at(other).id == id; });
    return place == kNone ? nullptr : &at(place);
  }

  // A new, empty request; the id is not open. Other requests stay where they are.
  Request& add(std::string_view id) {
    if (free_.empty()) grow();
    Request& request = at(free_.back());
    request.id.assign(id.data(), id.size());
    table_.insert(hash(id), free_.back());
    request.place = free_.back();
    free_.pop_back();
    ++size_;
    return request;
  }

  void erase(Request& request) {
    table_.erase(hash(request.id), request.place);
    free_.push_back(request.place);
    request.recycle();
    --size_;
  }

  // Calls fn(request) for every open request.
  template <typename Fn>
  void for_each(Fn fn) {
    for (auto& chunk : chunks_)
      for (int64_t i = 0; i < kChunk; ++i)
        if (!chunk[i].id.empty()) fn(chunk[i]);
  }

 private:
  static constexpr int64_t kChunk = 64;
  static constexpr uint64_t kSecret = 0xd6e8feb86659fd93ull;

  // The last words may overlap; ids of a batch mostly differ in a few characters.
  static uint64_t hash(std::string_view id) {
    const char* at = id.data();
    const size_t size = id.size();
    if (size < 8) {
      uint64_t word = 0;
      std::memcpy(&word, at, size);
      return mix(word ^ kHashRoot, size ^ kSecret);
    }
    uint64_t hash = size ^ kSecret;
    for (size_t i = 0; i + 8 < size; i += 8) hash = mix(hash ^ load64(at + i), kHashRoot);
    return mix(hash ^ load64(at + size - 8), kHashRoot ^ size);
  }
  Request& at(NodeId place) { return chunks_[static_cast<size_t>(place / kChunk)][place % kChunk]; }

  void grow() {
    const NodeId first = static_cast<NodeId>(chunks_.size() * kChunk);
    chunks_.push_back(std::make_unique<Request[]>(kChunk));
    for (NodeId place = first + kChunk - 1; place >= first; --place) free_.push_back(place);
    table_.reserve(chunks_.size() * kChunk, [this](NodeId place) { return hash(at(place).id); });
  }

  std::vector<std::unique_ptr<Request[]>> chunks_;
  HashTable table_;
  Row<NodeId> free_;
  int64_t size_ = 0;
};

}  // namespace fastkv::core
