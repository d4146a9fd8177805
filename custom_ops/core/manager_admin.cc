// The manager as an operator sees it: resize, reset, invalidate, counts, and the check of every invariant.
#include <algorithm>
#include <unordered_set>

#include "manager.h"

namespace fastkv::core {

int64_t Manager::evict(int64_t num_blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_blocks < 0) throw RequestFault("cannot evict " + std::to_string(num_blocks) + " blocks; ask for 0 or more");
  const int64_t count = std::min(num_blocks, index_.num_evictable(kDevice));
  index_.evict(kDevice, count);
  return count;
}

int64_t Manager::resize(int64_t num_blocks, bool drain) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_blocks < 1 || num_blocks > INT32_MAX)
    throw RequestFault("num_blocks " + std::to_string(num_blocks) + " must be at least 1 and fit 32 bits");
  const auto limit = static_cast<BlockId>(num_blocks);
  if (known_ && !drain && limit < device_.num_blocks()) {
    const int64_t stuck = held_from(limit);
    if (stuck)
      throw RequestFault("cannot shrink from " + std::to_string(device_.num_blocks()) + " to " +
                         std::to_string(num_blocks) + " device blocks: " + std::to_string(stuck) +
                         " blocks past that are held; release requests first, or resize with drain=True");
  }
  known_ = true;
  device_.resize(limit);
  index_.reserve();
  index_.set_device_limit(limit);
  return device_.num_draining();
}

int64_t Manager::held_from(BlockId limit) const {
  const std::vector<bool> is_free = device_.free_flags();
  return std::count(is_free.begin() + limit, is_free.end(), false) - index_.num_evictable_from(limit);
}

void Manager::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!requests_.empty())
    throw RequestFault(std::to_string(requests_.size()) + " requests are open; release them before reset");
  forget_everything();
}

void Manager::invalidate() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_everything();
  ++epoch_;
  // A request without blocks has nothing that old weights computed.
  requests_.for_each([&](Request& request) {
    if (request.table.empty() && request.path.empty()) request.epoch = epoch_;
  });
}

void Manager::forget_everything() {
  index_.invalidate();
  for (const auto& [pin, end] : pins_) drop_pin(end);
  pins_.clear();
}

void Manager::tick(double now_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  now_s_ = std::max(now_s_, now_s);
  index_.expire(now_s_);
}

int64_t Manager::num_tokens(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return get(id).num_tokens();
}

int64_t Manager::num_computed_tokens(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return get(id).computed;
}

bool Manager::is_open(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return requests_.find(id) != nullptr;
}

int64_t Manager::num_open() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return requests_.size();
}

LevelCounts Manager::counts(Level level) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const BlockPool& pool = level == kDevice ? device_ : host_;
  const int64_t evictable = index_.num_evictable(level);
  return {pool.num_blocks() + pool.num_draining(), pool.num_free(), evictable, pool.num_used() - evictable,
          index_.num_evicted(level)};
}

Counters Manager::counters() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

int64_t Manager::bookkeeping_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t blocks = device_.num_blocks() + host_.num_blocks();
  return index_.bytes() + blocks * static_cast<int64_t>(sizeof(BlockId)) + blocks / 8;
}

void Manager::check() {
  const std::lock_guard<std::mutex> lock(mutex_);
  device_.check();
  host_.check();
  index_.check();
  const std::vector<bool> is_free = device_.free_flags();
  std::unordered_set<BlockId> owned;
  std::unordered_map<NodeId, int32_t> ends;
  int64_t used = 0;
  const auto claim = [&](BlockId block, const std::string& owner) {
    const bool exists = block >= 0 && (block < device_.num_blocks() ? !is_free[block] : device_.is_draining(block));
    if (!exists) throw InvariantFault(owner + " has block " + std::to_string(block) + ", which is free");
    if (!owned.insert(block).second)
      throw InvariantFault("block " + std::to_string(block) + " belongs to " + owner + " and another");
    ++used;
  };
  requests_.for_each([&](const Request& request) {
    const std::string who = "request '" + request.id + "'";
    for (int64_t i = request.shared; i < request.num_blocks(); ++i) claim(request.table[i], who);
    if (request.shared > request.path.size()) throw InvariantFault(who + " shares blocks that it does not hold");
    for (int64_t i = 0; i < request.path.size(); ++i) {
      const Node& node = index_.node(request.path[i]);
      if (node.parent != (i ? request.path[i - 1] : kNone)) throw InvariantFault(who + " holds a broken path");
      if (node.holders < 1) throw InvariantFault(who + " holds a node that nobody holds");
      if (i < request.shared && node.block[kDevice] != request.table[i])
        throw InvariantFault(who + " has another block in its table than its node has");
    }
    if (!request.path.empty()) ++ends[request.path.back()];
  });
  for (const auto& [pin, end] : pins_) ++ends[end];
  for (const auto& [id, transfer] : transfers_)
    if (transfer.kind == TransferKind::kLoad && !transfer.request)
      for (const BlockId block : transfer.device) claim(block, "transfer " + std::to_string(id));
  index_.for_each([&](NodeId id, const Node& node, int32_t held_children) {
    if (node.block[kDevice] != kNone) claim(node.block[kDevice], "node " + std::to_string(id));
    const auto end = ends.find(id);
    if (node.holders != held_children + (end == ends.end() ? 0 : end->second))
      throw InvariantFault("node " + std::to_string(id) + " counts " + std::to_string(node.holders) + " holders");
  });
  if (used != device_.num_used())
    throw InvariantFault(std::to_string(device_.num_used() - used) + " device blocks leaked");
  check_transfers();
}

}  // namespace fastkv::core
