// The manager's half of moving blocks between levels; transfers.h explains states and guarantees.
// Cost: O(1) a block that moves or is evicted for it.
#include <algorithm>

#include "manager.h"

namespace fastkv::core {
namespace {

std::string quoted(std::string_view id) { return "'" + std::string(id) + "'"; }

}  // namespace

int64_t Manager::host_room() const { return host_.num_free() + index_.num_evictable(kHost); }

// Host blocks for as many of the nodes as there is room, which are then in a copy; the others are cut off.
void Manager::take_host_blocks(Transfer& transfer) {
  for (const NodeId node : transfer.nodes) index_.begin_copy(node);  // so that none of them is evicted for another
  const auto room = static_cast<size_t>(host_room());
  while (transfer.nodes.size() > room) {
    index_.end_copy(transfer.nodes.back());
    transfer.nodes.pop_back();
  }
  const auto count = static_cast<int32_t>(transfer.nodes.size());
  if (count > host_.num_free()) index_.evict(kHost, count - host_.num_free());
  transfer.host.resize(static_cast<size_t>(count));
  host_.allocate(count, transfer.host.data());
  for (const NodeId node : transfer.nodes) {
    index_.set_arriving(node, true);
    transfer.device.push_back(index_.node(node).block[kDevice]);
  }
}

BegunTransfer Manager::register_transfer(Transfer transfer) {
  BegunTransfer begun{0, transfer.nodes, transfer.device, transfer.host};
  if (transfer.nodes.empty()) return begun;
  begun.id = next_transfer_++;
  transfers_.emplace(begun.id, std::move(transfer));
  return begun;
}

BegunTransfer Manager::begin_offload(std::string_view id, int64_t min_hits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  Transfer transfer;
  const int64_t most = host_room();
  for (; request.offered < request.shared && static_cast<int64_t>(transfer.nodes.size()) < most; ++request.offered) {
    const Node& node = index_.node(request.path[request.offered]);
    if (node.hits < min_hits || node.has(kUnfindable)) break;
    if (node.block[kHost] == kNone && !node.has(kArriving)) transfer.nodes.push_back(request.path[request.offered]);
  }
  take_host_blocks(transfer);
  return register_transfer(std::move(transfer));
}

BegunTransfer Manager::begin_write_back(int64_t num_victims) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Transfer transfer;
  std::vector<NodeId> victims;
  index_.next_victims(kDevice, num_victims, victims);
  // All of them are kept meanwhile: if one's host copy made room for another's, the caller would ask for ever.
  for (const NodeId victim : victims) index_.begin_copy(victim);
  for (const NodeId victim : victims)
    if (index_.node(victim).block[kHost] == kNone && !index_.node(victim).has(kArriving))
      transfer.nodes.push_back(victim);
  take_host_blocks(transfer);
  for (const NodeId victim : victims) index_.end_copy(victim);
  for (auto* row : {&transfer.device, &transfer.host, &transfer.nodes}) std::reverse(row->begin(), row->end());
  return register_transfer(std::move(transfer));
}

BegunTransfer Manager::begin_load(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  const int64_t known = request.path.size();
  if (request.load > 0) throw RequestFault("the host blocks of " + quoted(id) + " are being loaded already");
  if (request.num_blocks() < known)
    throw RequestFault(quoted(id) + " has " + std::to_string(request.num_blocks()) + " blocks and " +
                       std::to_string(known) + " cached ones; allocate room for them before loading");
  Transfer transfer;
  transfer.kind = TransferKind::kLoad;
  transfer.request = &request;
  for (int64_t block = request.shared; block < known; ++block) {
    const NodeId node = request.path[block];
    transfer.nodes.push_back(node);
    transfer.device.push_back(request.table[block]);
    transfer.host.push_back(index_.node(node).block[kHost]);
    index_.begin_copy(node);
  }
  const BegunTransfer begun = register_transfer(std::move(transfer));
  request.load = begun.id;
  return begun;
}

int64_t Manager::cached_blocks(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  Row<NodeId> path;
  if (options_.enable_prefix_caching)
    index_.match(query_of(request), (request.num_tokens() - 1) / options_.block_size, path);
  return path.size();
}

BegunTransfer Manager::begin_fetch(std::string_view id, int64_t first, int64_t num_blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  Transfer transfer;
  transfer.kind = TransferKind::kFetch;
  Row<NodeId> path;
  index_.match(query_of(request), std::min(first, request.num_tokens() / options_.block_size), path);
  int64_t last = std::min(first + num_blocks, request.num_tokens() / options_.block_size);
  const bool is_known = path.size() == first;  // else blocks were evicted since they were counted
  if (!options_.enable_prefix_caching || request.epoch != epoch_ || !is_known) last = first;
  NodeId parent = first && is_known ? path.back() : kNone;
  if (parent != kNone) index_.begin_copy(parent);  // it is not evicted to make room for what comes below it
  for (int64_t block = first; block < last && host_room() > 0; ++block) {
    if (!host_.num_free()) index_.evict(kHost, 1);
    NodeId node;
    if (!index_.expect(query_of(request), block, parent, &node)) break;  // it is arriving already
    index_.begin_copy(node);
    transfer.nodes.push_back(node);
    transfer.host.emplace_back();
    host_.allocate(1, &transfer.host.back());
    parent = node;
  }
  if (first && is_known) index_.end_copy(path.back());
  return register_transfer(std::move(transfer));
}

// The blocks of an ended transfer go to their nodes, or back to the pool.
void Manager::settle(Transfer& transfer, int64_t num_landed) {
  const bool to_device = transfer.kind == TransferKind::kLoad;
  const auto& blocks = to_device ? transfer.device : transfer.host;
  for (size_t i = 0; i < transfer.nodes.size(); ++i) {
    const NodeId node = transfer.nodes[i];
    if (!to_device) index_.set_arriving(node, false);
    const bool landed = static_cast<int64_t>(i) < num_landed;
    if (!landed || !index_.land(node, to_device ? kDevice : kHost, blocks[i]))
      (to_device ? device_ : host_).free(blocks[i]);
  }
}

BegunTransfer Manager::end_transfer(int64_t id, int64_t num_landed, bool store) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = transfers_.find(id);
  if (found == transfers_.end())
    throw RequestFault("transfer " + std::to_string(id) + " is not in flight; end each transfer once");
  Transfer transfer = std::move(found->second);
  transfers_.erase(found);
  if (transfer.kind == TransferKind::kLoad && transfer.request)
    // The blocks are the request's; publish makes them findable.
    transfer.request->load = num_landed < static_cast<int64_t>(transfer.nodes.size()) ? kFailedLoad : 0;
  else if (transfer.kind != TransferKind::kStore)
    settle(transfer, num_landed);
  Transfer next;
  next.kind = TransferKind::kStore;
  if (store && transfer.kind == TransferKind::kOffload) {
    for (size_t i = 0; i < transfer.nodes.size(); ++i) {
      const NodeId node = transfer.nodes[i];
      if (index_.node(node).block[kHost] != transfer.host[i] || index_.node(node).has(kUnfindable)) continue;
      index_.begin_copy(node);
      next.nodes.push_back(node);
      next.host.push_back(transfer.host[i]);
    }
  }
  // Deepest first, so that nothing goes before what hangs below it.
  for (auto node = transfer.nodes.rbegin(); node != transfer.nodes.rend(); ++node) index_.end_copy(*node);
  return register_transfer(std::move(next));
}

std::vector<Digest> Manager::transfer_digests(int64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = transfers_.find(id);
  if (found == transfers_.end()) throw RequestFault("transfer " + std::to_string(id) + " is not in flight");
  std::vector<Digest> digests;
  for (const NodeId node : found->second.nodes) digests.push_back(index_.digest(node));
  return digests;
}

int64_t Manager::num_transfers() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(transfers_.size());
}

int64_t Manager::forget_level(Level level) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const BlockPool& pool = level == kDevice ? device_ : host_;
  const int64_t held = pool.num_used() - index_.num_evictable(level);
  if (held)
    throw RequestFault(std::to_string(held) + " " + level_name(level) +
                       " blocks are held by requests, pins or copies; release them and wait for the copies first");
  const int64_t count = index_.num_evictable(level);
  index_.evict(level, count);
  return count;
}

void Manager::check_transfers() const {
  std::unordered_map<NodeId, int32_t> ends, children;
  for (const auto& [id, transfer] : transfers_)
    for (const NodeId node : transfer.nodes) ++ends[node];
  int64_t host_used = 0;
  index_.for_each([&](NodeId, const Node& node, int32_t) {
    if (node.has(kInCopy) && node.parent != kNone) ++children[node.parent];
    host_used += node.block[kHost] != kNone;
  });
  index_.for_each([&](NodeId id, const Node&, int32_t) {
    const auto end = ends.find(id), child = children.find(id);
    if (index_.copies(id) != (end == ends.end() ? 0 : end->second) + (child == children.end() ? 0 : child->second))
      throw InvariantFault("node " + std::to_string(id) + " counts " + std::to_string(index_.copies(id)) + " copies");
  });
  for (const auto& [id, transfer] : transfers_) {
    if (transfer.kind == TransferKind::kOffload || transfer.kind == TransferKind::kFetch)
      host_used += static_cast<int64_t>(transfer.host.size());
    for (const NodeId node : transfer.nodes)
      if (!index_.node(node).has(kInUse)) throw InvariantFault("a transfer names a node that left the index");
  }
  if (host_used != host_.num_used())
    throw InvariantFault(std::to_string(host_.num_used() - host_used) + " host blocks leaked");
}

}  // namespace fastkv::core
