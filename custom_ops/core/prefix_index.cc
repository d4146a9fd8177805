#include "prefix_index.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fastkv::core {
namespace {

constexpr int64_t kChunk = 16;  // blocks whose memory is fetched together; 8 and 32 measured the same within noise

// Whether n tokens agree. Blocks are short and mostly agree, so one branch at the end beats memcmp's call and ladder.
inline bool same_tokens(const int32_t* a, const int32_t* b, int64_t n) {
  int64_t i = 0;
#if defined(__SSE2__)
  __m128i differ = _mm_setzero_si128();
  for (; i + 4 <= n; i += 4) {
    const __m128i left = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i));
    const __m128i right = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i));
    differ = _mm_or_si128(differ, _mm_xor_si128(left, right));
  }
  if (_mm_movemask_epi8(_mm_cmpeq_epi8(differ, _mm_setzero_si128())) != 0xffff) return false;
#endif
  return std::memcmp(a + i, b + i, static_cast<size_t>(n - i) * sizeof(int32_t)) == 0;
}

}  // namespace

PrefixIndex::PrefixIndex(int32_t block_size, BlockPool& device, BlockPool& host, Policy policy, uint64_t seed,
                         uint64_t hash_mask)
    : block_size_(block_size),
      pools_{&device, &host},
      policy_(policy),
      hash_(seed, hash_mask),
      order_{EvictionOrder(nodes_, kDevice, policy), EvictionOrder(nodes_, kHost, policy)} {
  reserve();
}

void PrefixIndex::reserve() {
  // Every node has a copy, or a copy arriving, in a block of its own.
  const size_t most = static_cast<size_t>(pools_[kDevice]->num_blocks() + pools_[kDevice]->num_draining()) +
                      static_cast<size_t>(pools_[kHost]->num_blocks()) + 1;
  if (most > nodes_.size()) {
    nodes_.grow_to(most);
    tokens_.grow_to(most * static_cast<size_t>(block_size_));
    table_.reserve(most, [this](NodeId id) { return nodes_[id].hash; });
  }
  order_[kDevice].set_probation_target(pools_[kDevice]->num_blocks() / 10);
  if (policy_ == Policy::kTwoQueue && !ghosts_)
    ghosts_ = std::make_unique<GhostList>(static_cast<size_t>(pools_[kDevice]->num_blocks()));
}

std::string_view PrefixIndex::extra(NodeId id) const {
  return nodes_[id].has(kHasExtra) ? std::string_view(extras_.at(id)) : std::string_view();
}

std::string_view PrefixIndex::extra_of(const Query& query, int64_t block) {
  if (query.extras.empty()) return {};
  const auto at = std::lower_bound(query.extras.begin(), query.extras.end(), block,
                                   [](const Extra& extra, int64_t wanted) { return extra.block < wanted; });
  return at != query.extras.end() && at->block == block ? std::string_view(at->bytes) : std::string_view();
}

bool PrefixIndex::same(NodeId id, NodeId parent, const int32_t* tokens, std::string_view extra) const {
  const Node& node = nodes_[id];
  if (node.parent != parent || !same_tokens(this->tokens(id), tokens, block_size_)) return false;
  if (extra.empty() && !node.has(kHasExtra)) return true;
  return this->extra(id) == extra;
}

void PrefixIndex::hash_to(const Query& query, int64_t blocks) {
  int64_t block = static_cast<int64_t>(query.hashes.size());
  uint64_t parent = block ? query.hashes.back() : kHashRoot;
  for (; block < blocks; ++block) {
    parent = hash_.block(parent, query.tokens + block * block_size_, static_cast<size_t>(block_size_),
                         extra_of(query, block));
    query.hashes.push_back(parent);
  }
}

void PrefixIndex::match(const Query& query, int64_t max_blocks, std::vector<NodeId>& path) {
  NodeId guesses[2][kChunk];
  const auto hash_chunk = [&](int64_t from) {
    const int64_t to = std::min(from + kChunk, max_blocks);
    hash_to(query, to);
    for (int64_t i = from; i < to; ++i) table_.prefetch(query.hashes[i]);
  };
  const auto guess_chunk = [&](int64_t from) {
    const int64_t to = std::min(from + kChunk, max_blocks);
    NodeId* guess = guesses[from / kChunk % 2];
    for (int64_t i = from; i < to; ++i, ++guess) {
      *guess = table_.candidate(query.hashes[i]);
      if (*guess == kNone) continue;
      __builtin_prefetch(&nodes_[*guess]);
      const char* row = reinterpret_cast<const char*>(tokens(*guess));
      for (int64_t byte = 0; byte < block_size_ * 4; byte += 64) __builtin_prefetch(row + byte);
    }
  };
  hash_chunk(0);
  hash_chunk(kChunk);
  guess_chunk(0);
  NodeId parent = kNone;
  for (int64_t from = 0; from < max_blocks; from += kChunk) {
    if (from + 2 * kChunk < max_blocks) hash_chunk(from + 2 * kChunk);
    if (from + kChunk < max_blocks) guess_chunk(from + kChunk);
    const int64_t to = std::min(from + kChunk, max_blocks);
    const NodeId* guess = guesses[from / kChunk % 2];
    for (int64_t block = from; block < to; ++block, ++guess) {
      const int32_t* tokens = query.tokens + block * block_size_;
      NodeId id = *guess;
      if (id == kNone) return;
      if (!same(id, parent, tokens, extra_of(query, block))) id = find(parent, query, block);
      if (id == kNone) return;
      if (!nodes_[id].resident()) return;
      path.push_back(id);
      parent = id;
    }
  }
}

void PrefixIndex::prepare(const Query& query, int64_t from, int64_t to) {
  hash_to(query, to);
  const int64_t recycled = static_cast<int64_t>(free_nodes_.size());
  for (int64_t i = from; i < to; ++i) {
    table_.prefetch(query.hashes[i]);
    const int64_t ahead = i - from;
    const NodeId id = ahead < recycled ? free_nodes_[recycled - 1 - ahead] : fresh_node_ + (ahead - recycled);
    __builtin_prefetch(&nodes_[id], 1);
    const char* row = reinterpret_cast<const char*>(tokens(id));
    for (int64_t byte = 0; byte < block_size_ * 4; byte += 64) __builtin_prefetch(row + byte, 1);
  }
}

NodeId PrefixIndex::find(NodeId parent, const Query& query, int64_t block) const {
  const int32_t* tokens = query.tokens + block * block_size_;
  const std::string_view extra = extra_of(query, block);
  return table_.find(query.hashes[block], [&](NodeId id) { return same(id, parent, tokens, extra); });
}

NodeId PrefixIndex::insert(NodeId parent, const Query& query, int64_t block, bool findable) {
  NodeId id;
  if (!free_nodes_.empty()) {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  } else {
    id = fresh_node_++;
    if (static_cast<size_t>(id) >= nodes_.size()) throw InvariantFault("more nodes than blocks");
  }
  Node& node = nodes_[id];
  node = Node{
      query.hashes[block], parent, {kNone, kNone}, 0, kNone, kNone, kNone, 0, {}, {kNoList, kNoList}, kInUse, 0, 0, 0};
  std::memcpy(&tokens_[static_cast<size_t>(id) * block_size_], query.tokens + block * block_size_,
              static_cast<size_t>(block_size_) * sizeof(int32_t));
  const std::string_view extra = extra_of(query, block);
  if (!extra.empty()) {
    extras_[id] = std::string(extra);
    node.set(kHasExtra, true);
  }
  if (parent != kNone) {
    node.next_sibling = nodes_[parent].first_child;
    if (node.next_sibling != kNone) nodes_[node.next_sibling].prev_sibling = id;
    nodes_[parent].first_child = id;
  }
  if (findable)
    table_.insert(node.hash, id);
  else
    node.set(kUnfindable, true);
  if (ghosts_ && ghosts_->take(node.hash) && (parent == kNone || nodes_[parent].has(kHot))) node.set(kHot, true);
  ++num_nodes_;
  return id;
}

void PrefixIndex::attach(NodeId id, Level level, BlockId block) {
  Node& node = nodes_[id];
  node.block[level] = block;
  if (level == kDevice && node.parent != kNone) ++nodes_[node.parent].device_children;
  if (node.holders == 0) order_[level].push(id);
}

void PrefixIndex::detach(NodeId id, Level level) {
  Node& node = nodes_[id];
  if (node.list[level] != kNoList) order_[level].remove(id);
  pools_[level]->free(node.block[level]);
  node.block[level] = kNone;
  if (level == kDevice && node.parent != kNone) --nodes_[node.parent].device_children;
}

void PrefixIndex::pick_up(NodeId id) {
  for (const Level level : {kDevice, kHost})
    if (nodes_[id].list[level] != kNoList) order_[level].remove(id);
}

void PrefixIndex::let_go(NodeId id) {
  Node& node = nodes_[id];
  if (node.has(kUnfindable)) return remove_subtree(id);
  if (node.block[kDevice] >= device_limit_) drop(id, kDevice);
  if (!node.has(kInUse)) return;
  for (const Level level : {kDevice, kHost})
    if (node.block[level] != kNone) order_[level].push(id);
}

void PrefixIndex::hold(const NodeId* path, int64_t count) {
  for (int64_t i = count - 1; i >= 0; --i) {
    if (i >= 8) __builtin_prefetch(&nodes_[path[i - 8]], 1);
    if (nodes_[path[i]].holders++ != 0) return;
    pick_up(path[i]);
  }
}

void PrefixIndex::unhold(const NodeId* path, int64_t count) {
  for (int64_t i = count - 1; i >= 0; --i) {
    if (i >= 8) __builtin_prefetch(&nodes_[path[i - 8]], 1);
    if (--nodes_[path[i]].holders != 0) return;
    let_go(path[i]);
  }
}

void PrefixIndex::move_hold_down(NodeId id) {
  Node& node = nodes_[id];
  if (node.holders++ == 0)
    pick_up(id);  // the parent loses the end of a hold and gains a held child: nothing changes there
  else if (node.parent != kNone)
    --nodes_[node.parent].holders;
}

void PrefixIndex::hold_one(NodeId id) {
  while (id != kNone && nodes_[id].holders++ == 0) {
    pick_up(id);
    id = nodes_[id].parent;
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
  NodeId ahead = order.victim();
  for (int64_t i = 0; i < 8 && ahead != kNone && i < count; ++i) {
    table_.prefetch(nodes_[ahead].hash);
    ahead = order.after(ahead);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (ahead != kNone) {
      table_.prefetch(nodes_[ahead].hash);
      ahead = order.after(ahead);
      if (ahead != kNone) __builtin_prefetch(&nodes_[ahead], 1);
    }
    const NodeId id = order.victim();
    if (id == kNone) throw InvariantFault("an eviction order is shorter than its count");
    Node& node = nodes_[id];
    if (ghosts_ && level == kDevice && node.list[kDevice] == EvictionOrder::kProbation) ghosts_->add(node.hash);
    detach(id, level);
    if (!node.resident() && !node.has(kArriving)) remove_subtree(id);
  }
  evicted_[level] += count;
}

}  // namespace fastkv::core
