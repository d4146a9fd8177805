// Copies between levels, as the index sees them: nodes in a copy, and copies that land.
//
// A copy in flight pins its node, and with it everything above, in place: the node keeps its place in the eviction
// orders, is passed over by them and counts as held (kInCopy, copies_). So a copy never changes what is evicted next,
// and neither end of it is reused before the copy ended, whatever requests, evictions or invalidations do meanwhile.
//
//     begin_copy --> in a copy --end_copy--> as before; gone if it lost its last copy or its name meanwhile
//
// copies_[id] = copies that end at the node + its children that are in a copy. Cost: O(1) a node that changes.
#include <algorithm>

#include "prefix_index.h"

namespace fastkv::core {

void PrefixIndex::begin_copy(NodeId id) {
  for (; id != kNone && copies_[id]++ == 0; id = nodes_[id].parent) {
    Node& node = nodes_[id];
    for (const Level level : {kDevice, kHost})
      if (node.list[level] != kNoList) order_[level].pass_over(id);
    node.set(kInCopy, true);
  }
}

void PrefixIndex::end_copy(NodeId id) {
  while (id != kNone) {
    const auto count = copies_.find(id);
    if (--count->second != 0) return;
    copies_.erase(count);
    Node& node = nodes_[id];
    const NodeId parent = node.parent;
    node.set(kInCopy, false);
    for (const Level level : {kDevice, kHost})
      if (node.list[level] != kNoList) order_[level].count_again(id);
    if (node.holders == 0) {
      if (node.has(kUnfindable) || !node.resident())
        remove_subtree(id);
      else if (node.block[kDevice] >= device_limit_)
        drop(id, kDevice);
    }
    id = parent;
  }
}

bool PrefixIndex::land(NodeId id, Level level, BlockId block) {
  Node& node = nodes_[id];
  const bool has_place = level == kHost || node.parent == kNone || nodes_[node.parent].block[kDevice] != kNone;
  if (node.has(kUnfindable) || node.block[level] != kNone || !has_place) return false;
  attach(id, level, block);
  if (node.holders != 0) return true;
  // It goes before the nearest node above that is in the order: that one was let go later.
  NodeId above = node.parent;
  while (above != kNone && nodes_[above].list[level] == kNoList && nodes_[above].holders == 0)
    above = nodes_[above].parent;
  order_[level].push(id);
  if (above == kNone || nodes_[above].list[level] != node.list[level]) return true;
  order_[level].remove(id);
  order_[level].push_before(id, above);
  return true;
}

int64_t PrefixIndex::next_victims(Level level, int64_t most, std::vector<NodeId>& out) const {
  int64_t seen = 0;
  for (int list = 0; list < EvictionOrder::kLists; ++list) {
    for (NodeId id = order_[level].head(list); id != kNone && seen < most; id = order_[level].after(id)) {
      if (nodes_[id].has(kInCopy)) continue;
      out.push_back(id);
      ++seen;
    }
  }
  return seen;
}

}  // namespace fastkv::core
