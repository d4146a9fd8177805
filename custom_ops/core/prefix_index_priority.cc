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

bool PrefixIndex::Expiry::operator<(const Expiry& other) const {  // a std heap has its greatest element first
  if (at_s != other.at_s) return at_s > other.at_s;
  return depth != other.depth ? depth < other.depth : number > other.number;
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
    expiries_.push_back({expiry_s, count, path[count - 1], lives_[path[count - 1]].generation, num_raises_++});
    std::push_heap(expiries_.begin(), expiries_.end());
  }
}

void PrefixIndex::expire(double now_s) {
  std::vector<std::pair<int64_t, NodeId>> due;  // depth, node
  while (!expiries_.empty() && expiries_.front().at_s <= now_s) {
    const Expiry entry = expiries_.front();
    std::pop_heap(expiries_.begin(), expiries_.end());
    expiries_.pop_back();
    if (lives_[entry.node].generation != entry.generation) continue;
    int64_t depth = entry.depth;
    for (NodeId id = entry.node; id != kNone && nodes_[id].priority && lives_[id].expiry_s <= now_s;
         id = nodes_[id].parent) {
      due.emplace_back(depth--, id);
      nodes_[id].priority = 0;
    }
  }
  std::stable_sort(due.begin(), due.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [depth, id] : due) {
    for (const Level level : {kDevice, kHost}) {
      if (nodes_[id].list[level] == kNoList) continue;
      order_[level].remove(id);
      order_[level].push(id);
    }
  }
}

}  // namespace fastkv::core
