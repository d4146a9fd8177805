// Priorities with a time to live.
//
// A priority is raised along a whole prefix, by maximum, and so is its expiry: of two related nodes the upper one never
// has less of either. When an expiry passes, the node falls back to priority 0 as if it had been used at that moment.
// expiries_ is a heap with one entry a raise, not one a block: (expiry, end node). It covers every node above that has
// the same expiry; when its end node leaves, the entry passes to the parent. An entry whose node was raised since ends
// at once, and its successor is in the heap. Cost: O(log raises) a raise, and a block with a priority that leaves; a
// sort of the blocks that expire.
#include <algorithm>

#include "prefix_index.h"

namespace fastkv::core {

void PrefixIndex::raise_priority(const NodeId* path, int64_t count, uint8_t priority, double expiry_s) {
  if (lives_.size() < nodes_.size()) lives_.grow_to(nodes_.size());
  const uint64_t number = num_raises_++;
  for (int64_t i = 0; i < count; ++i) {
    Node& node = nodes_[path[i]];
    Life& life = lives_[path[i]];
    life.expiry_s = node.priority ? std::max(life.expiry_s, expiry_s) : expiry_s;
    life.number = number;
    life.depth = i;
    node.priority = std::max(node.priority, priority);
  }
  if (count) expect_expiry(path[count - 1]);
}

void PrefixIndex::expect_expiry(NodeId id) {
  if (id == kNone || !nodes_[id].priority || lives_[id].expiry_s == std::numeric_limits<double>::infinity()) return;
  expiries_.push_back({lives_[id].expiry_s, lives_[id].generation, id});
  std::push_heap(expiries_.begin(), expiries_.end());
}

void PrefixIndex::expire(double now_s) {
  std::vector<NodeId> due;
  while (!expiries_.empty() && expiries_.front().at_s <= now_s) {
    const Expiry entry = expiries_.front();
    std::pop_heap(expiries_.begin(), expiries_.end());
    expiries_.pop_back();
    if (lives_[entry.node].generation != entry.generation) continue;
    for (NodeId id = entry.node; id != kNone && nodes_[id].priority && lives_[id].expiry_s <= now_s;
         id = nodes_[id].parent) {
      due.push_back(id);
      nodes_[id].priority = 0;
    }
  }
  // Deepest first, then those whose last raise is older.
  std::sort(due.begin(), due.end(), [this](NodeId a, NodeId b) {
    return lives_[a].depth != lives_[b].depth ? lives_[a].depth > lives_[b].depth : lives_[a].number < lives_[b].number;
  });
  for (const NodeId id : due) {
    for (const Level level : {kDevice, kHost}) {
      if (nodes_[id].list[level] == kNoList) continue;
      order_[level].remove(id);
      order_[level].push(id);
    }
  }
}

}  // namespace fastkv::core
