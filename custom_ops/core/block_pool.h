// BlockPool: the block ids of one level; which are handed out, which are free.
//
// Layout: the free ids below fresh_ lie on a stack; ids from fresh_ on were never handed out. The stack gives back ids
// in the order of their last use, which keeps neighbours in a prompt neighbours in memory.
//
//     FREE --allocate--> handed out --free--> FREE            resize: ids >= num_blocks are never handed out again;
//                             `--free, id >= num_blocks--> gone         those in use drain
//
// The pool believes its owner: the manager's books cannot write a double free, and check() would find it. A tracked
// pool also keeps a bit for each id, so that somebody else's calls can be checked one by one. Cost: O(1) a block;
// resize O(blocks). Always holds: num_free + num_used = num_blocks + num_draining.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "row.h"
#include "types.h"

namespace fastkv::core {

class BlockPool {
 public:
  BlockPool(int32_t num_blocks, Level level, bool tracked = false)
      : num_blocks_(num_blocks), level_(level), tracked_(tracked), used_bits_(tracked ? num_blocks : 0) {}

  Level level() const { return level_; }
  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return static_cast<int32_t>(stack_.size()) + std::max(0, num_blocks_ - fresh_); }
  int32_t num_used() const { return num_used_; }
  int32_t num_draining() const { return static_cast<int32_t>(draining_.size()); }

  // Hand out count ids into out; the caller has made sure that count <= num_free().
  void allocate(int32_t count, BlockId* out) {
    const int32_t recycled = std::min<int32_t>(count, static_cast<int32_t>(stack_.size()));
    const BlockId* top = stack_.end();
    for (int32_t i = 0; i < recycled; ++i) out[i] = *--top;
    stack_.resize(stack_.size() - recycled);
    for (int32_t i = recycled; i < count; ++i) out[i] = fresh_++;
    num_used_ += count;
    if (tracked_)
      for (int32_t i = 0; i < count; ++i) used_bits_[static_cast<size_t>(out[i])] = true;
  }

  // Take back an id that is handed out.
  void free(BlockId id) {
    --num_used_;
    if (tracked_) used_bits_[static_cast<size_t>(id)] = false;
    if (id < num_blocks_)
      stack_.push_back(id);
    else
      draining_.erase(id);
  }

  // Take back ids that are handed out, the last one first, so that they are handed out in this order again.
  void free(const BlockId* ids, int64_t count) {
    if (tracked_ || !draining_.empty()) {
      for (int64_t i = count - 1; i >= 0; --i) free(ids[i]);
      return;
    }
    const int64_t before = stack_.size();
    stack_.resize(before + count);
    std::reverse_copy(ids, ids + count, stack_.data() + before);
    num_used_ -= static_cast<int32_t>(count);
  }

  // Change the number of ids. Ids >= num_blocks that are in use drain: each vanishes when it is freed.
  void resize(int32_t num_blocks) {
    const int32_t old = num_blocks_;
    if (num_blocks < old) {
      const std::vector<bool> is_free = free_flags();
      for (BlockId id = num_blocks; id < old; ++id)
        if (!is_free[static_cast<size_t>(id)]) draining_.insert(id);
      stack_.resize(std::remove_if(stack_.begin(), stack_.end(), [&](BlockId id) { return id >= num_blocks; }) -
                    stack_.begin());
    } else {
      for (BlockId id = std::min(fresh_, num_blocks) - 1; id >= old; --id)
        if (!draining_.erase(id)) stack_.push_back(id);  // an earlier shrink took it away, and it is not in use
    }
    num_blocks_ = num_blocks;
    if (tracked_ && num_blocks > old) used_bits_.resize(std::max(used_bits_.size(), static_cast<size_t>(num_blocks)));
  }

  // Whether each of the num_blocks ids is free; O(blocks).
  std::vector<bool> free_flags() const {
    std::vector<bool> is_free(static_cast<size_t>(num_blocks_), false);
    for (const BlockId id : stack_) is_free[static_cast<size_t>(id)] = true;
    for (BlockId id = fresh_; id < num_blocks_; ++id) is_free[static_cast<size_t>(id)] = true;
    return is_free;
  }
  // Of a tracked pool: whether the id is handed out.
  bool is_used(BlockId id) const { return id >= 0 && static_cast<size_t>(id) < used_bits_.size() && used_bits_[id]; }
  bool is_draining(BlockId id) const { return draining_.count(id) != 0; }

  // Recompute the counts. Throws InvariantFault.
  void check() const {
    const std::string name = level_name(level_);
    std::vector<bool> seen(static_cast<size_t>(num_blocks_), false);
    for (const BlockId id : stack_) {
      if (id < 0 || id >= num_blocks_ || id >= fresh_ || seen[static_cast<size_t>(id)])
        throw InvariantFault(name + " free list holds block " + std::to_string(id) + " twice, or it does not exist");
      seen[static_cast<size_t>(id)] = true;
    }
    for (const BlockId id : draining_)
      if (id < num_blocks_) throw InvariantFault(name + " block " + std::to_string(id) + " drains within the pool");
    if (num_free() + num_used_ != num_blocks_ + num_draining()) throw InvariantFault(name + " block counts differ");
  }

 private:
  int32_t num_blocks_;
  Level level_;
  bool tracked_;
  std::vector<bool> used_bits_;
  int32_t fresh_ = 0;  // no id from here on was ever handed out or put on the stack
  int32_t num_used_ = 0;
  Row<BlockId> stack_;
  std::unordered_set<BlockId> draining_;
};

}  // namespace fastkv::core
