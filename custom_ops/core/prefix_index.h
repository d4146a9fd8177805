// PrefixIndex: the tree of published blocks, found by content; holds; eviction per level.
//
// Layout: nodes_ (one cache line a node, see node.h), tokens_ (block_size int32 a node, at id * block_size), table_
// (hash -> node), extras_ (identity bytes of the few nodes that have any), one EvictionOrder a level. A fast hash
// proposes a node; its parent, tokens and identity bytes decide, so a collision costs time and never another prompt's
// KV.
//
// match follows the tree without hashing where it can: a node's first child, and on from there in steps of the same
// size, because a prompt that was published at once mostly has node ids in a row; parent and tokens decide, and nodes
// ahead are fetched by the step. Where that ends (a fork, or ids in no order) it hashes. Hashing and publish are
// software pipelines over a request's blocks, so that they wait for memory a few times a request and not twice a block:
//
//     by hash    block i + 24: hash it, fetch its table slot    publish    block i + 12: hash it, fetch its slot and
//                block i + 12: read the slot, fetch the node                the node and tokens that it will write
//                block i     : compare parent and tokens                   block i     : find or insert
//
// Cost: match, publish and evict O(1) a block expected; hold and unhold O(1) a block that changes between held and
// unheld; everything else O(1), except invalidate, shrink and check: O(nodes).
// Always holds (check() recomputes it): a node with a copy at a level has its parent there or at a faster level; a node
// is in the eviction order of a level exactly when it has a copy there and no holder; a node without a copy leaves.
//
// prefix_index.cc: match, publish. prefix_index_evict.cc: holds, eviction, removal. prefix_index_admin.cc: resize,
// invalidate, check. prefix_index_priority.cc: priorities. prefix_index_copies.cc: copies between levels.
// prefix_index_events.cc: digests, events.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "block_pool.h"
#include "event_log.h"
#include "eviction.h"
#include "ghost.h"
#include "hash.h"
#include "hash_table.h"
#include "row.h"
#include "sha256.h"

namespace fastkv::core {

// Identity bytes that first apply in one block of a request.
struct Extra {
  int64_t block;
  std::string bytes;
};

// A request as the index sees it. extras are sorted by block.
struct Query {
  const int32_t* tokens;
  const std::vector<Extra>& extras;
};

class PrefixIndex {
 public:
  // The pools get the blocks of nodes that leave a level. hash_mask thins out the fast hash in tests.
  PrefixIndex(int32_t block_size, BlockPool& device, BlockPool& host, Policy policy, uint64_t seed, uint64_t hash_mask);

  int32_t block_size() const { return block_size_; }
  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_evictable(Level level) const { return order_[level].size(); }
  int64_t num_evicted(Level level) const { return evicted_[level]; }
  const Node& node(NodeId id) const { return nodes_[id]; }
  const int32_t* tokens(NodeId id) const { return &tokens_[static_cast<size_t>(id) * block_size_]; }
  std::string_view extra(NodeId id) const {
    return nodes_[id].has(kHasExtra) ? std::string_view(extras_.at(id)) : std::string_view();
  }
  // Evictable device blocks with ids >= limit; O(nodes).
  int64_t num_evictable_from(BlockId limit) const;
  // Bytes of everything but the tokens.
  int64_t bytes() const;

  // Calls fn(id, node, number of its children that are held) for every node; O(nodes).
  template <typename Fn>
  void for_each(Fn fn) const {
    for (NodeId id = 0; id < fresh_node_; ++id) {
      const Node& node = nodes_[id];
      if (!node.has(kInUse)) continue;
      int32_t held = 0;
      for (NodeId child = node.first_child; child != kNone; child = nodes_[child].next_sibling)
        held += nodes_[child].holders > 0;
      fn(id, node, held);
    }
  }

  // Fit the arrays to the pools; called when a pool grows.
  void reserve();

  // Put into path the nodes of the longest findable prefix of at most max_blocks blocks that has a copy somewhere.
  void match(const Query& query, int64_t max_blocks, Row<NodeId>& path);

  // A match gave the node to a request. counts: it is the request's first since it was opened or preempted.
  void mark_found(NodeId id, bool counts) {
    Node& node = nodes_[id];
    node.set(kHot, true);
    node.hits = static_cast<uint16_t>(node.hits + (counts && node.hits != UINT16_MAX));
  }

  // Make blocks [path.size(), to) of the query findable, held through path: the caller's hold ends at path.back()
  // before and after. table[i] is block i's device block; where another copy is published already, the block is freed
  // and table[i] becomes the published one. Returns how many were.
  int64_t publish(const Query& query, int64_t to, Row<NodeId>& path, BlockId* table);

  // The same for one block, without making it findable.
  void share_privately(const Query& query, Row<NodeId>& path, BlockId block);

  // A held node gets its copy at a level, or loses it.
  void attach(NodeId id, Level level, BlockId block);
  void detach(NodeId id, Level level);

  // Take or give back one hold that ends at the last node of path (path[i] is the parent of path[i+1]).
  void hold(const NodeId* path, int64_t count);
  void unhold(const NodeId* path, int64_t count);
  void unhold_one(NodeId id);

  // Take count blocks from the eviction order; the caller has made sure that as many are evictable.
  void evict(Level level, int64_t count);

  // A copy reads from or writes to one of the node's blocks; the node and what is above it stay until as many ended.
  void begin_copy(NodeId id);
  void end_copy(NodeId id);

  // How many copies end at the node, or at children's side of it; 0 when it is in none.
  int32_t copies(NodeId id) const {
    const auto found = copies_.find(id);
    return found == copies_.end() ? 0 : found->second;
  }

  void set_arriving(NodeId id, bool on) { nodes_[id].set(kArriving, on); }

  // A node for block `block` of the query, below parent, whose bytes are arriving. False if there is such a node
  // already. Nobody holds it: begin_copy next.
  bool expect(const Query& query, int64_t block, NodeId parent, NodeId* id);

  // The bytes of a node in a copy have arrived in the block. False if the index has no use for them: the weights
  // changed, it has a copy at the level already, or it would be on the device without its parent.
  bool land(NodeId id, Level level, BlockId block);

  // Appends the next victims of a level, at most `most`, in order (for 2q: list after list).
  int64_t next_victims(Level level, int64_t most, std::vector<NodeId>& out) const;

  // Forget the node's copy at the level, and every copy below it that would lose its parent. Nothing of it is held.
  void drop(NodeId id, Level level);

  // Give every node of path at least this priority until expiry_s. The caller holds the path.
  void raise_priority(const NodeId* path, int64_t count, uint8_t priority, double expiry_s);
  // End the priorities whose expiry is not after now_s.
  void expire(double now_s);

  // The node's prefix digest; computed up the chain as far as it is not known yet.
  const Digest& digest(NodeId id);

  // From now on, keep a log of what becomes findable and what ceases to be. Call it on an empty index.
  void log_events();
  // What happened since the last call, oldest first.
  std::vector<Event> take_events();
  // What would bring a reader that knows nothing up to date; the log is empty afterwards.
  std::vector<Event> snapshot_events();

  // Device blocks >= limit leave as soon as nobody holds them.
  void set_device_limit(BlockId limit);

  // Nothing that is published now will be found again; what is held leaves with its last holder.
  void invalidate();

  void check() const;

 private:
  // Of a node that has, or had, a priority: when it ends, which raise came last, and how often the slot was reused.
  struct Life {
    double expiry_s;
    uint64_t number, generation;
    int64_t depth;
  };
  struct Expiry {
    double at_s;
    uint64_t generation;
    NodeId node;
    bool operator<(const Expiry& other) const { return at_s > other.at_s; }  // a std heap has its greatest first
  };

  std::string_view extra_of(const Query& query, int64_t block) const;
  bool same(NodeId id, NodeId parent, const int32_t* tokens, std::string_view extra) const;
  NodeId find(NodeId parent, uint64_t hash, const Query& query, int64_t block, size_t* empty) const;
  uint64_t hash(uint64_t parent, const Query& query, int64_t block) const;
  void prefetch_row(NodeId id, bool write) const;
  bool is_node(NodeId id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(fresh_node_); }
  void prefetch_if_node(NodeId id) const {
    if (is_node(id)) prefetch_row(id, false);
  }
  int64_t match_by_hash(const Query& query, int64_t from, int64_t to, NodeId* path) const;
  int64_t follow(const Query& query, int64_t max_blocks, int64_t from, NodeId* path) const;
  bool may_continue(NodeId id, bool not_the_first) const;
  NodeId insert(NodeId parent, uint64_t hash, const Query& query, int64_t block);
  void let_go(NodeId id);
  void lose_copy(NodeId id, Node& node, Level level);
  void pick_up(NodeId id);
  void expect_expiry(NodeId id);
  int64_t evict_run(Level level, NodeId id, int64_t count);
  void remove(NodeId id);
  void remove_subtree(NodeId id);
  void note_stored(NodeId id, Level level);
  void note_removed(NodeId id, Level level);
  void note_cleared();
  bool room_in_log();
  void resolve(Event& event);
  void resolve_events();
  void append_findable();

  const int32_t block_size_;
  BlockPool* const pools_[kLevels];
  const Policy policy_;
  const TokenHash hash_;
  FlatArray<Node> nodes_;
  FlatArray<int32_t> tokens_;
  HashTable table_;
  EvictionOrder order_[kLevels];
  std::unordered_map<NodeId, std::string> extras_;
  std::unique_ptr<GhostList> ghosts_;
  std::unique_ptr<EventLog> log_;  // only when somebody wants events
  FlatArray<Digest> digests_;      // empty until the first digest
  FlatArray<Life> lives_;          // empty until the first priority
  std::vector<Expiry> expiries_;
  uint64_t num_raises_ = 0;
  Row<NodeId> free_nodes_;
  NodeId fresh_node_ = 0;
  int64_t num_nodes_ = 0;
  int64_t evicted_[kLevels] = {0, 0};
  BlockId device_limit_ = INT32_MAX;
  std::unordered_map<NodeId, int32_t> copies_;
};

}  // namespace fastkv::core
