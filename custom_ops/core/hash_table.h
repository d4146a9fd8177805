// HashTable: hash -> id, open addressing with linear probing.
//
// Layout: a power of two of 8-byte slots {tag, id + 1}; the tag is the upper half of the hash, and the home of a slot
// is the tag's upper bits, so a slot says by itself where it belongs and nobody has to visit the node to move it.
// At most half of the slots are used: 16 to 32 bytes an entry.
//
//     slots:  . . [tag id] [tag id] . [tag id] . .        0 in the id half = empty, so a fresh mapping is an empty
//     table
//
// Equal tags are legal: probe() walks all entries that may match, and the caller compares what they stand for.
// Removal shifts the rest of the run back (no tombstones), so the table does not age.
// Cost: O(1) expected for find, insert and erase; rehash only in reserve().
#pragma once

#include <cstdint>

#include "flat_array.h"
#include "types.h"

namespace fastkv::core {

class HashTable {
 public:
  // Room for max_entries entries without another rehash. hash_of(id) gives the hash of an entry that is in the table.
  template <typename HashOf>
  void reserve(size_t max_entries, HashOf hash_of) {
    int bits = 4;
    while ((size_t{1} << bits) < max_entries * 2) ++bits;
    if (bits <= bits_ && slots_.size()) return;
    FlatArray<Slot> old = std::move(slots_);
    slots_ = FlatArray<Slot>(size_t{1} << bits);
    std::memset(static_cast<void*>(slots_.data()), 0, slots_.size() * sizeof(Slot));  // no page faults later
    bits_ = bits;
    mask_ = slots_.size() - 1;
    for (size_t i = 0; i < old.size(); ++i)
      if (old[i].id_plus_1) insert(hash_of(old[i].id_plus_1 - 1), old[i].id_plus_1 - 1);
  }

  void prefetch(uint64_t hash) const { __builtin_prefetch(&slots_[home(tag_of(hash))]); }

  // An entry that find() will look at first, to prefetch what it stands for; it need not be the right one.
  NodeId candidate(uint64_t hash) const {
    const uint32_t tag = tag_of(hash);
    for (size_t i = home(tag); slots_[i].id_plus_1; i = (i + 1) & mask_)
      if (slots_[i].tag == tag) return slots_[i].id_plus_1 - 1;
    return kNone;
  }

  // First entry from the hash's home on for which equals(id) holds; kNone when there is none. *empty is the slot where
  // the search ended then: insert_at may put the entry there, until the table is next changed.
  template <typename Equals>
  NodeId find(uint64_t hash, Equals equals, size_t* empty = nullptr) const {
    const uint32_t tag = tag_of(hash);
    for (size_t i = home(tag);; i = (i + 1) & mask_) {
      const Slot slot = slots_[i];
      if (!slot.id_plus_1) {
        if (empty) *empty = i;
        return kNone;
      }
      if (slot.tag == tag && equals(slot.id_plus_1 - 1)) return slot.id_plus_1 - 1;
    }
  }

  void insert_at(size_t slot, uint64_t hash, NodeId id) { slots_[slot] = {tag_of(hash), id + 1}; }

  void insert(uint64_t hash, NodeId id) {
    const uint32_t tag = tag_of(hash);
    size_t i = home(tag);
    while (slots_[i].id_plus_1) i = (i + 1) & mask_;
    slots_[i] = {tag, id + 1};
  }

  // Take out the entry; it must be in the table.
  void erase(uint64_t hash, NodeId id) {
    size_t hole = home(tag_of(hash));
    while (slots_[hole].id_plus_1 != id + 1) {
      if (!slots_[hole].id_plus_1) throw InvariantFault("a node is missing from the hash table");
      hole = (hole + 1) & mask_;
    }
    for (size_t i = (hole + 1) & mask_; slots_[i].id_plus_1; i = (i + 1) & mask_) {
      const size_t from_home = (i - home(slots_[i].tag)) & mask_;
      if (from_home >= ((i - hole) & mask_)) {  // the entry may move back to the hole without passing its home
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole].id_plus_1 = 0;
  }

  void clear() { std::memset(static_cast<void*>(slots_.data()), 0, slots_.size() * sizeof(Slot)); }
  size_t bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  struct Slot {
    uint32_t tag;
    int32_t id_plus_1;
  };

  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }
  size_t home(uint32_t tag) const { return tag >> (32 - bits_); }

  FlatArray<Slot> slots_;
  size_t mask_ = 0;
  int bits_ = 0;
};

}  // namespace fastkv::core
