// Node: one published block, and the arrays that hold all of them.
//
// A node is named by (parent node, identity bytes, tokens), hence immutable, and may have a copy at each level. One
// node is one cache line; its tokens lie in a flat arena at id * block_size, so comparing them is one memcmp.
//
//   holders   number of holds that END at this node + number of its children that have holders.
//             A hold stands for the whole prefix: a node is held as long as anything below it is, and taking or giving
//             back a hold touches only the nodes that change between held and unheld.
//   children  a doubly linked list of siblings, needed only to drop what hangs below a node that leaves.
//   link      the node's place in the eviction order of each level, while it is evictable there.
//
// States at one level:
//
//     absent --attach--> held (holders > 0) <--hold / unhold--> evictable (in a list) --evict--> absent
//                                                                                                  |
//     no copy at any level, not in a copy: the node leaves the index  <----------------------------'
//
// A node in a copy (kInCopy, prefix_index_copies.cc) is held in place: it keeps its place in the lists and is passed
// over.
//
// Memory: 64 bytes a node + its tokens, + at most 32 bytes of hash table.
#pragma once

#include "flat_array.h"
#include "types.h"

namespace fastkv::core {

struct Link {
  NodeId prev, next;
};

constexpr uint8_t kNoList = 0xff;

enum NodeFlags : uint8_t {
  kInUse = 1,       // the slot holds a node
  kHasExtra = 2,    // identity bytes in PrefixIndex::extras_
  kUnfindable = 4,  // not in the hash table (invalidated, or prefix caching is off): leaves when the last holder does
  kHot = 8,         // found by a match since it was published
  kArriving = 16,   // a copy into a host block that will be its own is in flight
  kInCopy = 32,     // it, or something below it, is read or written by a copy: it stays, and is not evictable
  kHasDigest = 64,  // its digest is in PrefixIndex::digests_
  kEventPending = 128,  // the event log has an unresolved record of it
};

struct alignas(64) Node {
  uint64_t hash;
  NodeId parent;
  BlockId block[kLevels];
  int32_t holders;
  NodeId first_child, next_sibling, prev_sibling;
  int32_t device_children;  // children with a device copy
  Link link[kLevels];
  uint8_t list[kLevels];
  uint8_t flags;
  uint8_t priority;
  uint16_t hits;  // matches that found it, saturating
  uint16_t unused;

  bool has(NodeFlags flag) const { return flags & flag; }
  void set(NodeFlags flag, bool on) { flags = static_cast<uint8_t>(on ? flags | flag : flags & ~flag); }
  bool resident() const { return block[kDevice] != kNone || block[kHost] != kNone; }
};
static_assert(sizeof(Node) == 64, "a node is one cache line");

}  // namespace fastkv::core
