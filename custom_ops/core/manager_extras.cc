// The manager's calls that are not part of every request's life: speculation, forks, pins, digests.
#include <algorithm>

#include "manager.h"

namespace fastkv::core {
namespace {

std::string quoted(std::string_view id) { return "'" + std::string(id) + "'"; }

}  // namespace

bool Manager::try_reserve(std::string_view id, int64_t num_drafts, Row<BlockId>& ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  if (num_drafts < 0 || num_drafts > kMaxTokens)
    throw RequestFault("cannot reserve " + std::to_string(num_drafts) + " drafts for " + quoted(id) +
                       "; ask for 0 to " + std::to_string(kMaxTokens));
  const int64_t size = options_.block_size;
  const int64_t blocks = (request.num_tokens() + num_drafts + size - 1) / size;
  const int64_t before = request.num_blocks(), count = std::max<int64_t>(0, blocks - before);
  if (!take(request, count)) return false;
  ids.clear();
  ids.append(request.table.data() + before, count);
  return true;
}

int64_t Manager::confirm(std::string_view id, const int32_t* tokens, int64_t num_tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  request.tokens.append(tokens, num_tokens);
  const int64_t size = options_.block_size;
  const int64_t keep = std::max(request.shared, (request.num_tokens() + size - 1) / size);
  const int64_t given_back = std::max<int64_t>(0, request.num_blocks() - keep);
  request.table.resize(request.num_blocks() - given_back);
  device_.free(request.table.end(), given_back);
  return given_back;
}

std::vector<BlockCopy> Manager::fork(std::string_view parent_id, std::string_view child_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& parent = get(parent_id);
  const int64_t size = options_.block_size;
  if (requests_.find(child_id))
    throw RequestFault("request " + quoted(child_id) + " is open already; release it first or use another id");
  const int64_t full = parent.computed / size;
  const bool partial = parent.computed % size != 0;
  if (partial && available() < 1) throw OutOfBlocksFault(1, available(), device_.num_blocks(), kDevice);
  // What publish did not publish (caching is off, or the weights changed) is shared all the same, without being
  // findable.
  claim_known(parent, full);
  for (; parent.shared < full; ++parent.shared)
    index_.share_privately(query_of(parent), parent.path, parent.table[parent.shared]);
  Request& child = requests_.add(child_id);
  child.continue_from(parent, full);
  index_.hold(child.path.data(), full);
  std::vector<BlockCopy> copies;
  if (partial) {
    take(child, 1);
    copies.push_back({parent.table[full], child.table[full]});
  }
  return copies;
}

int64_t Manager::pin(std::string_view id, int64_t num_blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Request& request = get(id);
  if (num_blocks < 0) num_blocks = request.shared;
  if (num_blocks < 1 || num_blocks > request.shared)
    throw RequestFault("cannot pin " + std::to_string(num_blocks) + " blocks of " + quoted(id) + ": it has " +
                       std::to_string(request.shared) + " published blocks; compute and publish the prefix first");
  int64_t fresh = 0;
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (index_.node(request.path[i]).has(kUnfindable))
      throw RequestFault("cannot pin blocks of " + quoted(id) + ": nobody can find them");
    fresh += !pinned_.count(request.path[i]);
  }
  const int64_t limit = options_.max_pinned_blocks < 0 ? device_.num_blocks() / 2 : options_.max_pinned_blocks;
  if (static_cast<int64_t>(pinned_.size()) + fresh > limit)
    throw RequestFault("pinning " + std::to_string(fresh) +
                       " more blocks passes the limit: " + std::to_string(pinned_.size()) + " of at most " +
                       std::to_string(limit) + " are pinned; unpin a prefix or raise max_pinned_blocks");
  for (int64_t i = 0; i < num_blocks; ++i) ++pinned_[request.path[i]];
  index_.hold(request.path.data(), num_blocks);
  pins_[next_pin_] = request.path[num_blocks - 1];
  return next_pin_++;
}

void Manager::unpin(int64_t pin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pins_.find(pin);
  if (found == pins_.end()) throw RequestFault("pin " + std::to_string(pin) + " is not known; unpin each pin once");
  drop_pin(found->second);
  pins_.erase(found);
}

void Manager::drop_pin(NodeId end) {
  for (NodeId id = end; id != kNone; id = index_.node(id).parent) {
    const auto count = pinned_.find(id);
    if (--count->second == 0) pinned_.erase(count);
  }
  index_.unhold_one(end);
}

std::vector<Event> Manager::take_events(bool everything) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return everything ? index_.snapshot_events() : index_.take_events();
}

int64_t Manager::compute_digests(std::string_view id, int64_t num_blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  const int64_t size = options_.block_size;
  if (num_blocks < 0) num_blocks = request.num_tokens() / size;
  if (num_blocks > request.num_tokens() / size)
    throw RequestFault(quoted(id) + " has " + std::to_string(request.num_tokens() / size) + " full blocks, not " +
                       std::to_string(num_blocks));
  auto extra = request.extras.begin();
  for (auto block = static_cast<int64_t>(request.digests.size()); block < num_blocks; ++block) {
    while (extra != request.extras.end() && extra->block < block) ++extra;
    const bool applies = extra != request.extras.end() && extra->block == block;
    request.digests.push_back(block_digest(block ? request.digests.back() : root_digest(),
                                           applies ? std::string_view(extra->bytes) : std::string_view(),
                                           request.tokens.data() + block * size, static_cast<size_t>(size)));
  }
  return num_blocks;
}

}  // namespace fastkv::core
