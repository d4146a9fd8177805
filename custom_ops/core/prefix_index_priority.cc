// Priorities with a time to live.
//
// A priority is raised along a whole prefix, by maximum, and so is its expiry: of two related nodes the upper one never
// has less of either. When an expiry passes, the node falls back to priority 0 as if it had been used at that moment.
// expiries_ is a heap with one entry a raise, not one a block: (expiry, deeper first, end node); an entry whose node
// was reused or raised since is stale, and its successor is in the heap. Cost: O(log raises) a raise, O(1) a block that
// expires.
#include <algorithm>

#include "prefix_index.h"

namespace fastkv::core {

bool PrefixIndex::Expiry::operator<(const Expiry& other) const {
  return at_s != other.at_s ? at_s > other.at_s : depth < other.depth;  // std heap: greatest first
}

void PrefixIndex::raise_priority(const NodeId* path, int64_t count, uint8_t priority, double expiry_s) {
  if (lives_.size() < nodes_.size()) lives_.grow_to(nodes_.size());
  for (int64_t i = 0; i < count; ++i) {
    Node& node = nodes_[path[i]];
    Life& life = lives_[path[i]];
    life.expiry_s = node.priority ? std::max(life.expiry_s, expiry_s) : expiry_s;
    node.priority = std::max(node.priority, priority);
  }
  if (count && expiry_s < std::numeric_limits<double>::infinity()) {
    expiries_.push_back({expiry_s, count, path[count - 1], lives_[path[count - 1]].generation});
    std::push_heap(expiries_.begin(), expiries_.end());
  }
}

void PrefixIndex::expire(double now_s) {
  while (!expiries_.empty() && expiries_.front().at_s <= now_s) {
    const Expiry entry = expiries_.front();
    std::pop_heap(expiries_.begin(), expiries_.end());
    expiries_.pop_back();
    if (lives_[entry.node].generation != entry.generation) continue;
    for (NodeId id = entry.node; id != kNone && nodes_[id].priority && lives_[id].expiry_s <= now_s;
         id = nodes_[id].parent) {
      bool listed[kLevels];
      for (const Level level : {kDevice, kHost}) {
        listed[level] = nodes_[id].list[level] != kNoList;
        if (listed[level]) order_[level].remove(id);
      }
      nodes_[id].priority = 0;
      for (const Level level : {kDevice, kHost})
        if (listed[level]) order_[level].push(id);
    }
  }
}

}  // namespace fastkv::core
