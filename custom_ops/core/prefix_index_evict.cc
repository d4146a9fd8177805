// Holds, eviction and removal of nodes.
#include <algorithm>

#include "prefix_index.h"

namespace fastkv::core {
namespace {

constexpr int64_t kAhead = 12;  // nodes between a prefetch and its use

}  // namespace

void PrefixIndex::attach(NodeId id, Level level, BlockId block) {
  Node& node = nodes_[id];
  node.block[level] = block;
  if (log_) note_stored(id, level);
  if (level == kDevice && node.parent != kNone) ++nodes_[node.parent].device_children;
}

// The node's copy at the level goes back to the pool. The node is in no order of that level.
inline void PrefixIndex::lose_copy(NodeId id, Node& node, Level level) {
  if (log_) note_removed(id, level);
  pools_[level]->free(node.block[level]);
  node.block[level] = kNone;
  if (level == kDevice && node.parent != kNone) --nodes_[node.parent].device_children;
}

void PrefixIndex::detach(NodeId id, Level level) {
  if (nodes_[id].list[level] != kNoList) order_[level].remove(id);
  lose_copy(id, nodes_[id], level);
}

// The node is held from now on.
void PrefixIndex::pick_up(NodeId id) {
  for (const Level level : {kDevice, kHost})
    if (nodes_[id].list[level] != kNoList) order_[level].remove(id);
}

// Nobody holds the node from now on. It may leave at once, and its slot with it.
__attribute__((noinline)) void PrefixIndex::let_go(NodeId id) {  // kept out of unhold's loop, for its registers
  Node& node = nodes_[id];
  if (node.has(kUnfindable)) {
    if (!node.has(kInCopy)) remove_subtree(id);
    return;
  }
  if (node.block[kDevice] >= device_limit_ && !node.has(kInCopy)) {
    drop(id, kDevice);
    if (!node.has(kInUse)) return;
  }
  if (node.block[kDevice] != kNone) order_[kDevice].push(id);
  if (node.block[kHost] != kNone) order_[kHost].push(id);
}

void PrefixIndex::hold(const NodeId* path, int64_t count) {
  EvictionOrder::Remover device(order_[kDevice]), host(order_[kHost]);
  for (int64_t i = count - 1; i >= 0; --i) {
    if (i >= kAhead) __builtin_prefetch(&nodes_[path[i - kAhead]], 1);
    Node& node = nodes_[path[i]];
    if (node.holders++ != 0) return;
    if (node.has(kInCopy)) {
      device.flush();
      host.flush();
      pick_up(path[i]);
      continue;
    }
    if (node.list[kDevice] != kNoList) device.remove(path[i], node);
    if (node.list[kHost] != kNoList) host.remove(path[i], node);
  }
}

void PrefixIndex::unhold(const NodeId* path, int64_t count) {
  EvictionOrder::Pusher device(order_[kDevice]);
  for (int64_t i = std::max<int64_t>(0, count - kAhead); i < count; ++i) __builtin_prefetch(&nodes_[path[i]], 1);
  for (int64_t i = count - 1; i >= 0; --i) {
    if (i >= kAhead) __builtin_prefetch(&nodes_[path[i - kAhead]], 1);
    Node& node = nodes_[path[i]];
    if (--node.holders != 0) return;
    const bool is_usual = !(node.flags & (kUnfindable | kInCopy)) && node.block[kHost] == kNone &&
                          static_cast<uint32_t>(node.block[kDevice]) < static_cast<uint32_t>(device_limit_);
    if (__builtin_expect(is_usual, true)) {
      device.push(path[i], node);
    } else {
      device.flush();
      let_go(path[i]);
    }
  }
}

void PrefixIndex::unhold_one(NodeId id) {
  while (id != kNone && --nodes_[id].holders == 0) {
    const NodeId parent = nodes_[id].parent;
    let_go(id);
    id = parent;
  }
}

void PrefixIndex::evict(Level level, int64_t count) {
  EvictionOrder& order = order_[level];
  evicted_[level] += count;
  while (count) {
    const EvictionOrder::Victims victims = order.victims();
    if (victims.head == kNone) throw InvariantFault("an eviction order is shorter than its count");
    count -= evict_run(level, victims.head, std::min(count, victims.count));
  }
}

// Evict count nodes from `first` on, in list order, or fewer; returns how many.
int64_t PrefixIndex::evict_run(Level level, const NodeId first, int64_t count) {
  const int list = nodes_[first].list[level];
  NodeId ahead = first;  // what goes some evictions later: its table slot is fetched now
  for (int64_t i = 0; i < kAhead && i < count; ++i) {
    table_.prefetch(nodes_[ahead].hash);
    ahead = nodes_[ahead].link[level].next;
  }
  NodeId id = first;
  for (int64_t done = 1;; ++done) {
    if (ahead != kNone) {
      table_.prefetch(nodes_[ahead].hash);
      ahead = nodes_[ahead].link[level].next;
    }
    Node& node = nodes_[id];
    const NodeId next = node.link[level].next;
    if (ghosts_ && level == kDevice && list == EvictionOrder::kProbation) ghosts_->add(node.hash);
    node.list[level] = kNoList;
    lose_copy(id, node, level);
    const bool leaves = !node.resident(), has_children = node.first_child != kNone;
    if (leaves && !has_children) remove(id);
    if (done == count || (leaves && has_children)) {
      order_[level].cut(list, first, id, done);
      if (leaves && has_children) remove_subtree(id);  // on the host only; they may be anywhere in its order
      return done;
    }
    id = next;
  }
}

// Take a node without children and without copies out of the tree and give its slot back.
inline void PrefixIndex::remove(NodeId id) {
  Node& node = nodes_[id];
  if (node.has(kEventPending)) resolve_events();
  if (!node.has(kUnfindable)) table_.erase(node.hash, id);
  if (node.parent != kNone) {
    Node& parent = nodes_[node.parent];
    (node.prev_sibling == kNone ? parent.first_child : nodes_[node.prev_sibling].next_sibling) = node.next_sibling;
    if (node.next_sibling != kNone) nodes_[node.next_sibling].prev_sibling = node.prev_sibling;
  }
  if (node.has(kHasExtra)) extras_.erase(id);
  if (static_cast<size_t>(id) < lives_.size()) {
    ++lives_[id].generation;
    if (node.priority) expect_expiry(node.parent);
  }
  --num_nodes_;
  node.flags = 0;
  free_nodes_.push_back(id);
}

// Take out a node and everything below it, children first.
void PrefixIndex::remove_subtree(NodeId id) {
  for (NodeId at = id;;) {
    while (nodes_[at].first_child != kNone) at = nodes_[at].first_child;
    const NodeId parent = nodes_[at].parent;
    for (const Level level : {kDevice, kHost})
      if (nodes_[at].block[level] != kNone) detach(at, level);
    remove(at);
    if (at == id) return;
    at = parent;
  }
}

void PrefixIndex::drop(NodeId id, Level level) {
  if (nodes_[id].block[level] == kNone) return;
  for (NodeId at = id;;) {
    while (level == kDevice && nodes_[at].device_children) {  // children go before parents
      at = nodes_[at].first_child;
      while (nodes_[at].block[kDevice] == kNone) at = nodes_[at].next_sibling;
    }
    const NodeId parent = nodes_[at].parent;
    detach(at, level);
    ++evicted_[level];
    if (!nodes_[at].resident()) remove_subtree(at);
    if (at == id) return;
    at = parent;
  }
}

}  // namespace fastkv::core
