#include "manager.h"

#include <algorithm>

namespace fastkv::core {
namespace {

std::string quoted(std::string_view id) { return "'" + std::string(id) + "'"; }

int64_t blocks_for(int64_t tokens, int64_t block_size) { return (tokens + block_size - 1) / block_size; }

// The largest boundary <= blocks (in blocks) that cuts no image in two.
int64_t whole_images(const std::vector<Span>& images, int64_t blocks, int64_t block_size) {
  for (auto image = images.rbegin(); image != images.rend(); ++image)
    if (image->start < blocks * block_size && blocks * block_size < image->end) blocks = image->start / block_size;
  return blocks;
}

// One pass: long prompts come from memory and go to memory. False if any token is negative.
bool append_tokens(Row<int32_t>& row, const int32_t* tokens, int64_t count) {
  const int64_t before = row.size();
  row.resize(before + count);
  int32_t* to = row.data() + before;
  int32_t all = 0;
  for (int64_t i = 0; i < count; ++i) all |= to[i] = tokens[i];
  return all >= 0;
}

}  // namespace

Manager::Manager(const ManagerOptions& options)
    : options_(options),
      known_(options.num_device_blocks >= 0),
      device_(std::max(0, options.num_device_blocks), kDevice),
      host_(options.num_host_blocks, kHost),
      index_(options.block_size, device_, host_, options.policy, options.seed, options.hash_mask) {
  if (options.log_events) index_.log_events();
}

Request& Manager::get(std::string_view id) {
  Request* request = requests_.find(id);
  if (!request) throw RequestFault("request " + quoted(id) + " is not open; open it first, release it once");
  return *request;
}

int64_t Manager::available() const { return device_.num_free() + index_.num_evictable(kDevice); }

void Manager::need_known_pool() const {
  if (!known_)
    throw RequestFault("the number of device blocks is not known yet; call resize(num_blocks) when it was profiled");
}

bool Manager::open(std::string_view id, const int32_t* tokens, int64_t num_tokens, std::vector<Extra> extras,
                   std::vector<Span> images, int priority, double ttl_s) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (requests_.find(id))
    throw RequestFault("request " + quoted(id) + " is open already; release it first or use another id");
  if (num_tokens < 1) throw RequestFault("request " + quoted(id) + " has no tokens; give at least one");
  if (!images.empty() && images.back().end > num_tokens)
    throw RequestFault("request " + quoted(id) + " has " + std::to_string(num_tokens) +
                       " tokens and an image that ends at " + std::to_string(images.back().end));
  if (priority < 0 || priority > EvictionOrder::kMaxPriority)
    throw RequestFault("priority " + std::to_string(priority) + " is out of range; allowed: 0 to " +
                       std::to_string(EvictionOrder::kMaxPriority));
  if (!(ttl_s > 0)) throw RequestFault("ttl_s must be greater than 0");
  Request& request = requests_.add(id);
  if (!append_tokens(request.tokens, tokens, num_tokens)) {
    requests_.erase(request);
    return false;
  }
  request.extras = std::move(extras);
  request.images = std::move(images);
  request.priority = static_cast<uint8_t>(priority);
  request.ttl_s = ttl_s;
  request.epoch = epoch_;
  if (priority > 0) uses_priorities_.store(true, std::memory_order_relaxed);
  return true;
}

void Manager::match(std::string_view id, Match& found) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  const int64_t size = options_.block_size;
  if (request.num_blocks() > request.shared || request.computed > request.shared * size)
    throw RequestFault("request " + quoted(id) + " has blocks of its own; match before allocate, or preempt");
  drop_blocks(request);
  if (options_.enable_prefix_caching) {
    index_.match(query_of(request), (request.num_tokens() - 1) / size, request.path);
    request.path.resize(static_cast<size_t>(whole_images(request.images, request.path.size(), size)));
    index_.hold(request.path.data(), request.path.size());
  }
  request.table.resize(request.path.size());
  for (const NodeId id : request.path) {
    index_.mark_found(id, !request.counted);
    const Node& node = index_.node(id);
    if (node.block[kDevice] != kNone)
      request.table[request.shared++] = node.block[kDevice];
    else
      found.host_blocks.push_back(node.block[kHost]);
  }
  request.table.resize(request.shared);
  request.computed = request.shared * size;
  found.device_blocks = request.table;
  // A request that matches again while it waits counts once, with its latest result.
  const int64_t hits = request.path.size();
  counters_.matches += !request.counted;
  counters_.queried_tokens += request.counted ? 0 : request.num_tokens();
  counters_.hit_blocks += hits - request.counted_hits;
  request.counted = true;
  request.counted_hits = hits;
}

bool Manager::take(Request& request, int64_t count) {
  need_known_pool();
  if (count > available()) return false;
  if (count > device_.num_free()) index_.evict(kDevice, count - device_.num_free());
  const int64_t before = request.table.size();
  request.table.resize(before + count);
  device_.allocate(static_cast<int32_t>(count), request.table.data() + before);
  return true;
}

void Manager::check_allocation(const Request& request, int64_t count, int64_t room) const {
  if (count < 0)
    throw RequestFault("cannot allocate " + std::to_string(count) + " blocks for " + quoted(request.id) +
                       "; ask for 0 or more");
  if (request.num_blocks() + count > room)
    throw RequestFault("out_row has " + std::to_string(room) + " places, " + quoted(request.id) + " would have " +
                       std::to_string(request.num_blocks() + count) + " blocks");
}

int64_t Manager::blocks_needed(std::string_view id, int64_t num_tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Request& request = get(id);
  if (num_tokens < 0 || num_tokens > kMaxTokens)
    throw RequestFault("num_tokens " + std::to_string(num_tokens) + " of " + quoted(id) + " must be 0 to " +
                       std::to_string(kMaxTokens));
  return std::max<int64_t>(0, blocks_for(num_tokens, options_.block_size) - request.num_blocks());
}

void Manager::append(std::string_view id, const int32_t* tokens, int64_t num_tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  request.tokens.append(tokens, num_tokens);
}

int64_t Manager::publish(std::string_view id, int64_t num_computed_tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  const int64_t size = options_.block_size;
  if (num_computed_tokens < request.computed ||
      num_computed_tokens > std::min(request.num_tokens(), request.num_blocks() * size))
    throw RequestFault("request " + quoted(id) + " cannot have " + std::to_string(num_computed_tokens) +
                       " computed tokens: it had " + std::to_string(request.computed) + ", " +
                       std::to_string(request.num_tokens()) + " tokens are confirmed and its " +
                       std::to_string(request.num_blocks()) + " blocks hold " +
                       std::to_string(request.num_blocks() * size));
  if (request.load && num_computed_tokens > request.computed)
    throw RequestFault("request " + quoted(id) +
                       (request.load == kFailedLoad
                            ? " relied on blocks from the host whose copy failed; load them again, or preempt it"
                            : " waits for blocks from the host; publish when their copy has ended"));
  request.computed = num_computed_tokens;
  const int64_t full = num_computed_tokens / size;
  if (!options_.enable_prefix_caching || request.epoch != epoch_) return request.shared;
  claim_known(request, full);
  if (request.shared < full) {
    const int64_t duplicates = index_.publish(query_of(request), full, request.path, request.table.data());
    counters_.duplicate_blocks += duplicates;
    counters_.published_blocks += full - request.shared - duplicates;
    request.shared = full;
  }
  return request.shared;
}

// A match may have found blocks on the host only. They are held already; those below `full` get their device copy now.
void Manager::claim_known(Request& request, int64_t full) {
  const int64_t known = std::min(full, request.path.size());
  for (; request.shared < known; ++request.shared) {
    BlockId& own = request.table[request.shared];
    const NodeId id = request.path[request.shared];
    if (index_.node(id).block[kDevice] == kNone) {
      index_.attach(id, kDevice, own);
      ++counters_.published_blocks;
    } else {
      device_.free(own);
      own = index_.node(id).block[kDevice];
      ++counters_.duplicate_blocks;
    }
  }
}

void Manager::drop_blocks(Request& request) {
  // Blocks that a load is writing stay with the load.
  const int64_t own = request.load > 0 ? request.path.size() : request.shared;
  if (own < request.num_blocks()) device_.free(request.table.data() + own, request.num_blocks() - own);
  if (request.load > 0) transfers_.at(request.load).request = nullptr;
  if (request.priority)
    index_.raise_priority(request.path.data(), request.shared, request.priority, now_s_ + request.ttl_s);
  index_.unhold(request.path.data(), request.path.size());
  request.table.clear();
  request.path.clear();
  request.shared = request.computed = request.offered = request.load = 0;
  request.epoch = epoch_;
}

void Manager::preempt(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  drop_blocks(request);
  request.counted = false;
  request.counted_hits = 0;
}

void Manager::release(std::string_view id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Request& request = get(id);
  request.prefetch();
  drop_blocks(request);
  requests_.erase(request);
}

}  // namespace fastkv::core
