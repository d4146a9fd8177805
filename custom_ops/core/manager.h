// Manager: a request's whole life in the cache, as bookkeeping only.
//
//     open -> match -> allocate -> (append | reserve | trim | publish | allocate)* -> release
//               ^------------------- preempt <---------'             fork: another open request with the same past
//
// Every call is one native call over the whole request. Each validates first and mutates after: a call that throws has
// changed nothing. One mutex makes calls atomic; nothing inside calls back to the caller.
//
// Always holds (check() recomputes it): free + evictable + held = num_blocks at each level, no block in two sets.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "block_pool.h"
#include "prefix_index.h"
#include "request_map.h"
#include "transfers.h"

namespace fastkv::core {

struct ManagerOptions {
  int32_t num_device_blocks = -1;  // -1: unknown until resize()
  int32_t num_host_blocks = 0;
  int32_t block_size = 1;
  bool enable_prefix_caching = true;
  Policy policy = Policy::kLru;
  int64_t max_pinned_blocks = 0;  // -1: half of the device blocks
  uint64_t seed = 0;
  uint64_t hash_mask = ~uint64_t{0};
  bool log_events = false;
};

struct LevelCounts {
  int64_t num_blocks, free, evictable, held, evicted;
};

struct Counters {
  int64_t matches = 0, queried_tokens = 0, hit_blocks = 0, published_blocks = 0, duplicate_blocks = 0;
};

// What match found: the leading device_blocks of the request's table, then the nodes of host_blocks.
struct Match {
  Row<BlockId> device_blocks, host_blocks;
};

// One block to copy on the device before the forked request writes.
struct BlockCopy {
  BlockId source, target;
};

class Manager {
 public:
  explicit Manager(const ManagerOptions& options);

  // False, and nothing was opened: a token is negative.
  bool open(std::string_view id, const int32_t* tokens, int64_t num_tokens, std::vector<Extra> extras,
            std::vector<Span> images, int priority, double ttl_s);
  void match(std::string_view id, Match& found);
  // Append count blocks to the table, which may have at most `room` blocks then, and call fn(table, first of them,
  // count) under the lock. False when fewer blocks are free or evictable: left, before the call.
  template <typename Fn>
  bool try_allocate(std::string_view id, int64_t count, int64_t room, int64_t* left, Fn fn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Request& request = get(id);
    check_allocation(request, count, room);
    *left = available();
    if (!take(request, count)) return false;
    fn(request.table.data(), request.num_blocks() - count, count);
    return true;
  }
  int64_t blocks_needed(std::string_view id, int64_t num_tokens);
  void append(std::string_view id, const int32_t* tokens, int64_t num_tokens);
  int64_t publish(std::string_view id, int64_t num_computed_tokens);
  void preempt(std::string_view id);
  void release(std::string_view id);

  // Blocks for the confirmed tokens and num_drafts more; all or nothing.
  bool try_reserve(std::string_view id, int64_t num_drafts, Row<BlockId>& ids);
  // Append accepted tokens and give back the blocks past them; returns how many.
  int64_t confirm(std::string_view id, const int32_t* tokens, int64_t num_tokens);
  std::vector<BlockCopy> fork(std::string_view parent, std::string_view child);

  int64_t pin(std::string_view id, int64_t num_blocks);
  void unpin(int64_t pin);

  // Copies between levels; transfers.h. Offload: leading published blocks that were found at least min_hits times, as
  // far as there is room on the host. Write back: those of the next num_victims device victims that are not on the
  // host.
  BegunTransfer begin_offload(std::string_view id, int64_t min_hits);
  BegunTransfer begin_write_back(int64_t num_victims);
  BegunTransfer begin_load(std::string_view id);
  // Fetch: the num_blocks blocks after the first `first`, which are cached_blocks(id): blocks of the request that have
  // a copy on the device or the host.
  int64_t cached_blocks(std::string_view id);
  BegunTransfer begin_fetch(std::string_view id, int64_t first, int64_t num_blocks);
  // The first num_landed blocks arrived on every rank. With store, the host blocks that an offload brought are in a
  // copy again: the new transfer, to storage.
  BegunTransfer end_transfer(int64_t id, int64_t num_landed, bool store);
  std::vector<Digest> transfer_digests(int64_t id);
  int64_t num_transfers();
  // Forget all copies at a level, none of which is held; returns how many those were.
  int64_t forget_level(Level level);

  // Forget up to num_blocks blocks, as the policy orders them; returns how many there were.
  int64_t evict(int64_t num_blocks);
  // Device blocks from now on. Returns how many blocks past that are still in use and drain.
  int64_t resize(int64_t num_blocks, bool drain);
  void reset();
  void invalidate();
  // Time that priorities expire by, in seconds on any clock that does not go back.
  void tick(double now_s);

  // What became findable and what ceased to be since the last call; with everything, what a new reader needs.
  std::vector<Event> take_events(bool everything);

  // Calls fn(table, size) under the lock.
  template <typename Fn>
  auto with_table(std::string_view id, Fn fn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Request& request = get(id);
    return fn(request.table.data(), request.num_blocks());
  }
  int64_t num_tokens(std::string_view id);
  int64_t num_computed_tokens(std::string_view id);

  // Make sure that the digests of the leading num_blocks full blocks (-1: all) are known; returns how many those are.
  int64_t compute_digests(std::string_view id, int64_t num_blocks);
  // Calls fn(digests of the leading num_blocks blocks) under the lock.
  template <typename Fn>
  void with_digests(std::string_view id, int64_t num_blocks, Fn fn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Request& request = get(id);
    if (static_cast<int64_t>(request.digests.size()) < num_blocks) throw RequestFault("the request was reopened");
    fn(request.digests.data());
  }
  bool is_open(std::string_view id);
  int64_t num_open();
  int32_t block_size() const { return options_.block_size; }
  bool uses_priorities() const { return uses_priorities_.load(std::memory_order_relaxed); }
  LevelCounts counts(Level level);
  Counters counters();
  int64_t bookkeeping_bytes();
  void check();

 private:
  Request& get(std::string_view id);
  int64_t available() const;
  void need_known_pool() const;
  void check_allocation(const Request& request, int64_t count, int64_t room) const;
  bool take(Request& request, int64_t count);
  void claim_known(Request& request, int64_t full);
  void drop_blocks(Request& request);
  void drop_pin(NodeId end);
  void forget_everything();
  int64_t held_from(BlockId limit) const;
  int64_t host_room() const;
  void take_host_blocks(Transfer& transfer);
  BegunTransfer register_transfer(Transfer transfer);
  void settle(Transfer& transfer, int64_t num_landed);
  void check_transfers() const;
  Query query_of(Request& request) { return {request.tokens.data(), request.extras}; }

  std::mutex mutex_;
  const ManagerOptions options_;
  bool known_;
  BlockPool device_, host_;
  PrefixIndex index_;
  RequestMap requests_;
  std::unordered_map<int64_t, NodeId> pins_;    // pin -> the node where its hold ends
  std::unordered_map<NodeId, int64_t> pinned_;  // node -> pins that cover it
  int64_t next_pin_ = 1;
  std::unordered_map<int64_t, Transfer> transfers_;
  int64_t next_transfer_ = 1;
  uint64_t epoch_ = 0;
  std::atomic<bool> uses_priorities_{false};
  double now_s_ = 0;
  Counters counters_;
};

}  // namespace fastkv::core
