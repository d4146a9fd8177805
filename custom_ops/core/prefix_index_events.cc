// Node digests and the event log of PrefixIndex; see event_log.h.
#include <utility>

#include "prefix_index.h"

namespace fastkv::core {

void PrefixIndex::log_events() {
  if (!log_) log_ = std::make_unique<EventLog>();
}

const Digest& PrefixIndex::digest(NodeId id) {
  if (digests_.size() < nodes_.size()) digests_.grow_to(nodes_.size());
  std::vector<NodeId> missing;
  NodeId at = id;
  for (; at != kNone && !nodes_[at].has(kHasDigest); at = nodes_[at].parent) missing.push_back(at);
  for (; !missing.empty(); missing.pop_back()) {
    const NodeId below = missing.back();
    digests_[below] = block_digest(at == kNone ? root_digest() : digests_[at], extra(below), tokens(below),
                                   static_cast<size_t>(block_size_));
    nodes_[below].set(kHasDigest, true);
    at = below;
  }
  return digests_[id];
}

void PrefixIndex::note_stored(NodeId id, Level level) {
  if (nodes_[id].has(kUnfindable) || !room_in_log()) return;
  Event event(Event::kStored, level);
  event.node = id;
  nodes_[id].set(kEventPending, true);
  log_->records.push_back(std::move(event));
}

void PrefixIndex::note_removed(NodeId id, Level level) {
  if (nodes_[id].has(kUnfindable) || !room_in_log()) return;
  Event event(Event::kRemoved, level);
  event.digest = digest(id);
  log_->records.push_back(std::move(event));
}

void PrefixIndex::note_cleared() {
  if (!log_) return;
  for (const Event& event : log_->records)
    if (event.node != kNone) nodes_[event.node].set(kEventPending, false);
  log_->records.clear();
  log_->records.emplace_back(Event::kCleared);
  log_->num_resolved = 0;
  log_->overflowed = false;
}

bool PrefixIndex::room_in_log() {
  if (log_->records.size() >= EventLog::kMaxRecords) {
    note_cleared();
    log_->overflowed = true;
  }
  return !log_->overflowed;
}

void PrefixIndex::resolve(Event& event) {
  const NodeId id = std::exchange(event.node, kNone);
  if (id == kNone) return;
  const Node& node = nodes_[id];
  event.digest = digest(id);
  event.has_parent = node.parent != kNone;
  if (event.has_parent) event.parent = digests_[node.parent];
  event.tokens.assign(tokens(id), tokens(id) + block_size_);
  event.extra = extra(id);
  NodeId root = id;
  while (!extras_.empty() && nodes_[root].parent != kNone) root = nodes_[root].parent;
  event.root_extra = extra(root);
  nodes_[id].set(kEventPending, false);
}

void PrefixIndex::resolve_events() {
  for (; log_->num_resolved < log_->records.size(); ++log_->num_resolved) resolve(log_->records[log_->num_resolved]);
}

std::vector<Event> PrefixIndex::take_events() {
  if (!log_) return {};
  if (log_->overflowed) {
    note_cleared();
    append_findable();
  }
  resolve_events();
  log_->num_resolved = 0;
  return std::exchange(log_->records, {});
}

std::vector<Event> PrefixIndex::snapshot_events() {
  if (!log_) return {};
  note_cleared();
  append_findable();
  return take_events();
}

// A stored record for every copy of every findable node, parents first.
void PrefixIndex::append_findable() {
  std::vector<NodeId> stack;
  for (NodeId id = 0; id < fresh_node_; ++id)
    if (nodes_[id].has(kInUse) && nodes_[id].parent == kNone) stack.push_back(id);
  while (!stack.empty()) {
    const NodeId id = stack.back();
    stack.pop_back();
    for (const Level level : {kDevice, kHost}) {
      if (nodes_[id].block[level] == kNone || nodes_[id].has(kUnfindable)) continue;
      Event event(Event::kStored, level);
      event.node = id;
      resolve(event);
      log_->records.push_back(std::move(event));
    }
    for (NodeId child = nodes_[id].first_child; child != kNone; child = nodes_[child].next_sibling)
      stack.push_back(child);
  }
}

}  // namespace fastkv::core
