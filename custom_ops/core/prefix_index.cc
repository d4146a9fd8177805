#include "prefix_index.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fastkv::core {
namespace {

constexpr int64_t kAhead = 12;  // blocks between two stages of a pipeline; 8 to 24 measured the same
constexpr int64_t kRing = 32;   // a power of two > 2 * kAhead

// match: blocks in a row from where on it pays to look for the next one without its hash, and blocks that are hashed
// together where it does not.
constexpr int64_t kLongRun = 8;
constexpr int64_t kSegment = 32;

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
  order_[kDevice].set_probation_target(pools_[kDevice]->num_blocks() / 2);
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

inline uint64_t PrefixIndex::hash(uint64_t parent, const Query& query, int64_t block) const {
  return hash_.block(parent, query.tokens + block * block_size_, static_cast<size_t>(block_size_),
                     extra_of(query, block));
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

void PrefixIndex::match(const Query& query, int64_t max_blocks, Row<NodeId>& path) {
  path.resize(max_blocks);
  int64_t found = 0, segment = 1;
  while (found < max_blocks) {
    const int64_t to = std::min(max_blocks, found + segment);
    found = match_by_hash(query, found, to, path.data());
    if (found < to) break;
    int64_t run;
    do {
      run = follow(query, max_blocks, found, path.data());
      found += run;
    } while (run >= kLongRun);
    if (!may_continue(path[found - 1], run == 0)) break;
    segment = found - to >= kLongRun ? 1 : std::max(kSegment, 2 * segment);
  }
  path.resize(found);
}

// Leading blocks of [from, to) that are findable, by hash; path ends before `from`. Returns where they end.
int64_t PrefixIndex::match_by_hash(const Query& query, int64_t from, int64_t to, NodeId* path) const {
  NodeId guesses[kRing], parent = from ? path[from - 1] : kNone;
  uint64_t hashes[kRing], chain = from ? nodes_[parent].hash : kHashRoot;
  int64_t found = from;
  for (int64_t i = from; i < to + 2 * kAhead; ++i) {
    if (i < to) {
      hashes[i % kRing] = chain = hash(chain, query, i);
      table_.prefetch(chain);
    }
    const int64_t guess = i - kAhead;
    if (guess >= from && guess < to) {
      const NodeId id = table_.candidate(hashes[guess % kRing]);
      guesses[guess % kRing] = id;
      if (id != kNone) prefetch_row(id, false);
    }
    if (guess < from + kAhead) continue;
    NodeId id = guesses[found % kRing];
    if (id == kNone) break;
    if (!same(id, parent, query.tokens + found * block_size_, extra_of(query, found))) {
      id = find(parent, hashes[found % kRing], query, found, nullptr);
      if (id == kNone) break;
    }
    if (!nodes_[id].resident()) break;
    path[found++] = parent = id;
  }
  return found;
}

// Leading blocks from `from` on that are found without hashing: the first child of the path's end, and on from there in
// steps of the same size. Returns how many.
int64_t PrefixIndex::follow(const Query& query, int64_t max_blocks, int64_t from, NodeId* path) const {
  NodeId parent = path[from - 1], id = nodes_[parent].first_child;
  if (id == kNone) return 0;
  const NodeId step = id - parent;
  for (NodeId ahead = 0; ahead < kAhead; ++ahead) prefetch_if_node(id + ahead * step);
  int64_t i = from;
  for (; i < max_blocks && is_node(id); ++i, id += step) {
    if (i + kAhead < max_blocks) prefetch_if_node(id + kAhead * step);
    const Node& node = nodes_[id];
    if (!same(id, parent, query.tokens + i * block_size_, extra_of(query, i))) break;
    if ((node.flags & (kInUse | kUnfindable)) != kInUse || !node.resident()) break;
    path[i] = parent = id;
  }
  return i - from;
}

// Whether a block after the node may be findable; not_the_first: its first child is not the one.
bool PrefixIndex::may_continue(NodeId id, bool not_the_first) const {
  const NodeId child = nodes_[id].first_child;
  return child != kNone && !(not_the_first && nodes_[child].next_sibling == kNone);
}

inline NodeId PrefixIndex::find(NodeId parent, uint64_t hash, const Query& query, int64_t block, size_t* empty) const {
  const int32_t* tokens = query.tokens + block * block_size_;
  const std::string_view extra = extra_of(query, block);
  return table_.find(hash, [&](NodeId id) { return same(id, parent, tokens, extra); }, empty);
}

int64_t PrefixIndex::publish(const Query& query, int64_t to, Row<NodeId>& path, BlockId* table) {
  const int64_t from = path.size();
  path.resize(std::max(from, to));
  uint64_t hashes[kRing], chain = from ? nodes_[path[from - 1]].hash : kHashRoot;
  int64_t duplicates = 0;
  for (int64_t i = from; i < to + kAhead; ++i) {
    if (i < to) {
      hashes[i % kRing] = chain = hash(chain, query, i);
      table_.prefetch(chain);
      const int64_t waiting = std::min(i - from, kAhead), recycled = free_nodes_.size();
      const int64_t next = waiting < recycled ? free_nodes_[recycled - 1 - waiting] : fresh_node_ + waiting - recycled;
      prefetch_row(static_cast<NodeId>(next), true);
    }
    const int64_t block = i - kAhead;
    if (block < from) continue;
    const NodeId parent = block ? path[block - 1] : kNone;
    const uint64_t hash = hashes[block % kRing];
    size_t empty = 0;
    NodeId id = find(parent, hash, query, block, &empty);
    if (id == kNone) {
      id = insert(parent, hash, query, block);
      table_.insert_at(empty, hash, id);
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
      if (log_) note_stored(id, kDevice);
      if (parent != kNone) ++nodes_[parent].device_children;
    } else {
      pools_[kDevice]->free(table[block]);
      table[block] = nodes_[id].block[kDevice];
      ++duplicates;
    }
  }
  return duplicates;
}

void PrefixIndex::share_privately(const Query& query, Row<NodeId>& path, BlockId block) {
  const NodeId parent = path.empty() ? kNone : path.back();
  const uint64_t above = path.empty() ? kHashRoot : nodes_[parent].hash;
  const NodeId id = insert(parent, hash(above, query, path.size()), query, path.size());
  nodes_[id].set(kUnfindable, true);
  attach(id, kDevice, block);
  path.push_back(id);
}

bool PrefixIndex::expect(const Query& query, int64_t block, NodeId parent, NodeId* id) {
  const uint64_t name = hash(parent == kNone ? kHashRoot : nodes_[parent].hash, query, block);
  size_t empty = 0;
  if (find(parent, name, query, block, &empty) != kNone) return false;
  *id = insert(parent, name, query, block);
  Node& node = nodes_[*id];
  table_.insert_at(empty, name, *id);
  node.holders = 0;  // nobody holds it; it stays as long as it is in a copy
  node.set(kArriving, true);
  return true;
}

// A new node, held once by a hold that ended at the parent, with no copies and not in the table yet.
inline NodeId PrefixIndex::insert(NodeId parent, uint64_t hash, const Query& query, int64_t block) {
  NodeId id;
  if (!free_nodes_.empty()) {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  } else {
    id = fresh_node_++;
    if (static_cast<size_t>(id) >= nodes_.size()) throw InvariantFault("more nodes than blocks");
  }
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
