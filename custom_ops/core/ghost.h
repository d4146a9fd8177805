// GhostList: hashes of blocks that were evicted lately, first in, first out. It remembers that they were here, not what
// they held.
//
// Layout: a ring of hashes and a HashTable from hash to ring slot. Cost: O(1); about 24 bytes an entry.
#pragma once

#include "hash_table.h"

namespace fastkv::core {

class GhostList {
 public:
  explicit GhostList(size_t capacity) : ring_(capacity), used_(capacity) {
    if (capacity) table_.reserve(capacity, [this](NodeId slot) { return ring_[slot]; });
  }

  // Remember the hash, forgetting the oldest one when the ring is full.
  void add(uint64_t hash) {
    if (!ring_.size()) return;
    if (used_[next_]) table_.erase(ring_[next_], static_cast<NodeId>(next_));
    ring_[next_] = hash;
    used_[next_] = 1;
    table_.insert(hash, static_cast<NodeId>(next_));
    next_ = (next_ + 1) % ring_.size();
  }

  // Whether the hash is remembered; it is forgotten now.
  bool take(uint64_t hash) {
    if (!ring_.size()) return false;
    const NodeId slot = table_.find(hash, [&](NodeId id) { return ring_[id] == hash; });
    if (slot == kNone) return false;
    table_.erase(hash, slot);
    used_[slot] = 0;
    return true;
  }

 private:
  FlatArray<uint64_t> ring_;
  FlatArray<uint8_t> used_;
  HashTable table_;
  size_t next_ = 0;
};

}  // namespace fastkv::core
