// The rare calls of PrefixIndex: resizing, invalidating, and the check of every invariant.
#include <string>
#include <vector>

#include "prefix_index.h"

namespace fastkv::core {
namespace {

// In use, and neither a request nor a copy keeps it.
bool is_loose(const Node& node) { return node.has(kInUse) && node.holders == 0 && !node.has(kInCopy); }

}  // namespace

int64_t PrefixIndex::num_evictable_from(BlockId limit) const {
  int64_t count = 0;
  for (NodeId id = 0; id < fresh_node_; ++id) count += is_loose(nodes_[id]) && nodes_[id].block[kDevice] >= limit;
  return count;
}

int64_t PrefixIndex::bytes() const {
  return static_cast<int64_t>(nodes_.size() * (sizeof(Node) + sizeof(NodeId)) + table_.bytes());
}

void PrefixIndex::set_device_limit(BlockId limit) {
  device_limit_ = limit;
  for (NodeId id = 0; id < fresh_node_; ++id) {
    if (is_loose(nodes_[id]) && nodes_[id].block[kDevice] >= limit) drop(id, kDevice);
  }
}

void PrefixIndex::invalidate() {
  for (NodeId id = 0; id < fresh_node_; ++id) {
    Node& node = nodes_[id];
    if (!node.has(kInUse)) continue;
    node.set(kUnfindable, true);
    for (const Level level : {kDevice, kHost})
      if (node.list[level] != kNoList) order_[level].remove(id);
  }
  table_.clear();
  note_cleared();
  for (NodeId id = 0; id < fresh_node_; ++id)
    if (is_loose(nodes_[id])) remove_subtree(id);
}

void PrefixIndex::check() const {
  const auto fail = [](NodeId id, const std::string& what) {
    throw InvariantFault("node " + std::to_string(id) + " " + what);
  };
  const size_t slots = static_cast<size_t>(fresh_node_);
  std::vector<int32_t> children(slots, 0), device_children(slots, 0), held_children(slots, 0);
  const std::vector<bool> is_free[kLevels] = {pools_[kDevice]->free_flags(), pools_[kHost]->free_flags()};
  int64_t nodes = 0, listed[kLevels] = {0, 0};
  for (NodeId id = 0; id < fresh_node_; ++id) {
    const Node& node = nodes_[id];
    if (!node.has(kInUse)) continue;
    ++nodes;
    if (!node.resident() && !node.has(kInCopy)) fail(id, "has no copy and is still in the index");
    if (node.holders < 0) fail(id, "has fewer than no holders");
    if (node.has(kUnfindable) && is_loose(node)) fail(id, "is neither findable nor held");
    if (node.has(kInCopy) != (copies(id) > 0)) fail(id, "counts its copies wrongly");
    if (node.has(kArriving) && (!node.has(kInCopy) || node.block[kHost] != kNone)) fail(id, "expects bytes in vain");
    for (const Level level : {kDevice, kHost}) {
      const bool copy = node.block[level] != kNone;
      if (copy && node.block[level] < pools_[level]->num_blocks() && is_free[level][node.block[level]])
        fail(id, "has a copy in a free block");
      const bool evictable = copy && node.holders == 0 && !node.has(kUnfindable);
      if (evictable != (node.list[level] != kNoList)) fail(id, "is in the wrong set of a level");
      listed[level] += evictable && !node.has(kInCopy);
    }
    const int64_t found = node.has(kUnfindable) ? 1 : static_cast<int64_t>(table_.find(node.hash, [&](NodeId other) {
      return other == id;
    }) == id);
    if (!found) fail(id, "is missing from the hash table");
    if (node.parent == kNone) continue;
    const Node& parent = nodes_[node.parent];
    if (!parent.has(kInUse)) fail(id, "has a parent that is not in the index");
    if (node.block[kDevice] != kNone && parent.block[kDevice] == kNone) fail(id, "is on the device, its parent is not");
    if (node.block[kHost] != kNone && !parent.resident()) fail(id, "is on the host, its parent is nowhere");
    if (node.has(kInCopy) && !parent.has(kInCopy)) fail(id, "is in a copy and its parent is not");
    if (node.holders && !parent.holders) fail(id, "is held and its parent is not");
    if (node.has(kHot) && !parent.has(kHot)) fail(id, "is hot and its parent is not");
    if (node.priority > parent.priority) fail(id, "outranks its parent");
    ++children[node.parent];
    device_children[node.parent] += node.block[kDevice] != kNone;
    held_children[node.parent] += node.holders > 0;
  }
  if (nodes != num_nodes_) throw InvariantFault("the index counts its nodes wrongly");
  for (const Level level : {kDevice, kHost})
    if (listed[level] != order_[level].size()) throw InvariantFault("an eviction order counts its blocks wrongly");
  for (NodeId id = 0; id < fresh_node_; ++id) {
    const Node& node = nodes_[id];
    if (!node.has(kInUse)) continue;
    int32_t seen = 0;
    for (NodeId child = node.first_child; child != kNone; child = nodes_[child].next_sibling) {
      if (nodes_[child].parent != id) fail(child, "is in the child list of a node that is not its parent");
      ++seen;
    }
    if (seen != children[id]) fail(id, "does not list all of its children");
    if (node.device_children != device_children[id]) fail(id, "counts its device children wrongly");
    if (node.holders < held_children[id]) fail(id, "has fewer holders than held children");
  }
}

}  // namespace fastkv::core
