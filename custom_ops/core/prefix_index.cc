#include "prefix_index.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fastkv::core {
namespace {

constexpr int64_t kAhead = 12;  // blocks between two stages of a pipeline; 8 to 24 measured the same
constexpr int64_t kRing = 16;   // a power of two > kAhead

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
  for (; i < n; ++i)
    if (a[i] != b[i]) return false;
  return true;
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

inline std::string_view PrefixIndex::extra_of(const Query& query, int64_t block) const {
  if (query.extras.empty()) return {};
  const auto at = std::lower_bound(query.extras.begin(), query.extras.end(), block,
                                   [](const Extra& extra, int64_t wanted) { return extra.block < wanted; });
  return at != query.extras.end() && at->block == block ? std::string_view(at->bytes) : std::string_view();
}

inline bool PrefixIndex::same(NodeId id, NodeId parent, const int32_t* tokens, std::string_view extra) const {
  const Node& node = nodes_[id];
  if (!same_tokens(this->tokens(id), tokens, block_size_) || node.parent != parent) return false;
  if (extra.empty() && !node.has(kHasExtra)) return true;
  return this->extra(id) == extra;
}

// Hash of a block; the hashes of the blocks before it are known.
inline uint64_t PrefixIndex::hash(const Query& query, int64_t block) const {
  uint64_t* row = query.hashes.row.data();
  if (block >= query.hashes.known) {
    row[block] = hash_.block(block ? row[block - 1] : kHashRoot, query.tokens + block * block_size_,
                             static_cast<size_t>(block_size_), extra_of(query, block));
    query.hashes.known = block + 1;
  }
  return row[block];
}

inline void PrefixIndex::prefetch_row(NodeId id, bool write) const {
  const char* row = reinterpret_cast<const char*>(tokens(id));
  if (write) {
    __builtin_prefetch(&nodes_[id], 1);
    for (int64_t byte = 0; byte < block_size_ * 4; byte += 64) __builtin_prefetch(row + byte, 1);
  } else {
    __builtin_prefetch(&nodes_[id]);
    for (int64_t byte = 0; byte < block_size_ * 4; byte += 64) __builtin_prefetch(row + byte);
  }
}

void PrefixIndex::match(const Query& query, int64_t max_blocks, std::vector<NodeId>& path) {
  path.resize(static_cast<size_t>(max_blocks));
  if (static_cast<int64_t>(query.hashes.row.size()) < max_blocks) query.hashes.row.resize(path.size());
  NodeId guesses[kRing];
  NodeId parent = kNone;
  int64_t found = 0;
  for (int64_t i = 0; i < max_blocks + 2 * kAhead; ++i) {
    if (i < max_blocks) table_.prefetch(hash(query, i));
    const int64_t guess = i - kAhead;
    if (guess >= 0 && guess < max_blocks) {
      const NodeId id = table_.candidate(query.hashes.row[guess]);
      guesses[guess % kRing] = id;
      if (id != kNone) prefetch_row(id, false);
    }
    if (guess < kAhead) continue;
    NodeId id = guesses[found % kRing];
    if (id == kNone) break;
    if (!same(id, parent, query.tokens + found * block_size_, extra_of(query, found))) {
      id = find(parent, query, found, nullptr);
      if (id == kNone) break;
    }
    if (!nodes_[id].resident()) break;
    path[found++] = parent = id;
  }
  path.resize(static_cast<size_t>(found));
}

inline NodeId PrefixIndex::find(NodeId parent, const Query& query, int64_t block, size_t* empty) const {
  const int32_t* tokens = query.tokens + block * block_size_;
  const std::string_view extra = extra_of(query, block);
  return table_.find(query.hashes.row[block], [&](NodeId id) { return same(id, parent, tokens, extra); }, empty);
}

int64_t PrefixIndex::publish(const Query& query, int64_t to, std::vector<NodeId>& path, BlockId* table) {
  const int64_t from = static_cast<int64_t>(path.size());
  path.resize(static_cast<size_t>(std::max(from, to)));
  if (static_cast<int64_t>(query.hashes.row.size()) < to) query.hashes.row.resize(static_cast<size_t>(to));
  int64_t duplicates = 0;
  for (int64_t i = from; i < to + kAhead; ++i) {
    if (i < to) {
      table_.prefetch(hash(query, i));
      const int64_t waiting = std::min(i - from, kAhead), recycled = static_cast<int64_t>(free_nodes_.size());
      prefetch_row(waiting < recycled ? free_nodes_[recycled - 1 - waiting]
                                      : static_cast<NodeId>(fresh_node_ + (waiting - recycled)),
                   true);
    }
    const int64_t block = i - kAhead;
    if (block < from) continue;
    const NodeId parent = block ? path[block - 1] : kNone;
    size_t empty = 0;
    NodeId id = find(parent, query, block, &empty);
    if (id == kNone) {
      id = insert(parent, query, block);
      table_.insert_at(empty, nodes_[id].hash, id);
    } else {
      // The hold moves down: the parent loses the end of a hold, and gains a held child if the node was not held yet.
      if (nodes_[id].holders++ == 0)
        pick_up(id);
      else if (parent != kNone)
        --nodes_[parent].holders;
    }
    path[block] = id;
    if (nodes_[id].block[kDevice] == kNone) {
      nodes_[id].block[kDevice] = table[block];
      if (parent != kNone) ++nodes_[parent].device_children;
    } else {
      pools_[kDevice]->free(table[block]);
      table[block] = nodes_[id].block[kDevice];
      ++duplicates;
    }
  }
  return duplicates;
}

void PrefixIndex::share_privately(const Query& query, std::vector<NodeId>& path, BlockId block) {
  const NodeId parent = path.empty() ? kNone : path.back();
  const int64_t place = static_cast<int64_t>(path.size());
  query.hashes.row.resize(std::max(query.hashes.row.size(), path.size() + 1));
  hash(query, place);
  const NodeId id = insert(parent, query, place);
  nodes_[id].set(kUnfindable, true);
  attach(id, kDevice, block);
  path.push_back(id);
}

// A new node, held once by a hold that ended at the parent, with no copies and not in the table yet.
inline NodeId PrefixIndex::insert(NodeId parent, const Query& query, int64_t block) {
  NodeId id;
  if (!free_nodes_.empty()) {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  } else {
    id = fresh_node_++;
    if (static_cast<size_t>(id) >= nodes_.size()) throw InvariantFault("more nodes than blocks");
  }
  const uint64_t hash = query.hashes.row[block];
  NodeId sibling = kNone;
  uint8_t flags = kInUse;
  if (parent != kNone) {
    sibling = nodes_[parent].first_child;
    if (sibling != kNone) nodes_[sibling].prev_sibling = id;
    nodes_[parent].first_child = id;
  }
  if (ghosts_ && ghosts_->take(hash) && (parent == kNone || nodes_[parent].has(kHot))) flags |= kHot;
  const std::string_view extra = extra_of(query, block);
  if (!extra.empty()) {
    extras_[id] = std::string(extra);
    flags |= kHasExtra;
  }
  nodes_[id] = Node{hash, parent, {kNone, kNone}, 1, kNone, sibling, kNone, 0, {}, {kNoList, kNoList}, flags, 0, 0, 0};
  std::memcpy(&tokens_[static_cast<size_t>(id) * block_size_], query.tokens + block * block_size_,
              static_cast<size_t>(block_size_) * sizeof(int32_t));
  ++num_nodes_;
  return id;
}

}  // namespace fastkv::core
