// BlockPool: the block ids of one level; which are handed out, which are free.
//
// Layout: ids below fresh_ that are free lie on a stack; ids from fresh_ on were never handed out. One bit an id says
// whether it is handed out, so a double free is refused. The stack gives back ids in the order of their last use, which
// keeps neighbours in a prompt neighbours in memory.
//
//     FREE --allocate--> handed out --free--> FREE            resize: ids >= num_blocks are never handed out again;
//                             `--free, id >= num_blocks--> gone         those in use drain
//
// Cost: O(1) a block; resize O(free).
// Always holds: num_free + num_used = num_blocks + num_draining.
#pragma once

#include <algorithm>
#include <vector>

#include "types.h"

namespace fastkv::core {

class BlockPool {
 public:
  BlockPool(int32_t num_blocks, Level level) : num_blocks_(num_blocks), level_(level), used_bits_(words(num_blocks)) {}

  Level level() const { return level_; }
  int32_t num_blocks() const { return num_blocks_; }
  int32_t num_free() const { return static_cast<int32_t>(stack_.size()) + std::max(0, num_blocks_ - fresh_); }
  int32_t num_used() const { return num_used_; }
  int32_t num_draining() const { return num_draining_; }
  bool is_used(BlockId id) const { return id >= 0 && id < limit() && used_bits_[id >> 6] >> (id & 63) & 1; }

  // Hand out count ids into out; the caller has made sure that count <= num_free().
  void allocate(int32_t count, BlockId* out) {
    const int32_t recycled = std::min<int32_t>(count, static_cast<int32_t>(stack_.size()));
    for (int32_t i = 0; i < recycled; ++i) {
      out[i] = stack_.back();
      stack_.pop_back();
      mark(out[i]);
    }
    for (int32_t i = recycled; i < count; ++i) mark(out[i] = fresh_++);
    num_used_ += count;
  }

  // Take back an id that is handed out.
  void free(BlockId id) {
    unmark(id);
    --num_used_;
    if (id < num_blocks_)
      stack_.push_back(id);
    else
      --num_draining_;
  }

  // Change the number of ids. Ids >= num_blocks that are in use drain: each vanishes when it is freed.
  void resize(int32_t num_blocks) {
    if (words(num_blocks) > used_bits_.size()) used_bits_.resize(words(num_blocks));
    const int32_t old = num_blocks_;
    num_blocks_ = num_blocks;
    stack_.erase(std::remove_if(stack_.begin(), stack_.end(), [&](BlockId id) { return id >= num_blocks; }),
                 stack_.end());
    for (BlockId id = std::min(fresh_, num_blocks) - 1; id >= old; --id)  // ids that an earlier shrink took away
      if (!is_used(id)) stack_.push_back(id);
    num_draining_ = 0;
    for (BlockId id = num_blocks; id < limit(); ++id) num_draining_ += is_used(id);
  }

  // Recompute the counts. Throws InvariantFault.
  void check() const {
    std::vector<bool> seen(limit(), false);
    for (const BlockId id : stack_) {
      if (id < 0 || id >= num_blocks_ || is_used(id) || seen[id])
        throw InvariantFault(std::string(level_name(level_)) + " free list holds block " + std::to_string(id) +
                             " twice, or it is in use");
      seen[id] = true;
    }
    int32_t used = 0;
    for (BlockId id = 0; id < limit(); ++id) used += is_used(id);
    if (used != num_used_ || num_free() + num_used_ != num_blocks_ + num_draining_)
      throw InvariantFault(std::string(level_name(level_)) + " block counts differ from the blocks in use");
  }

 private:
  static size_t words(int32_t count) { return (static_cast<size_t>(count) + 63) / 64; }
  int32_t limit() const { return static_cast<int32_t>(used_bits_.size() * 64); }
  void mark(BlockId id) { used_bits_[id >> 6] |= uint64_t{1} << (id & 63); }
  void unmark(BlockId id) { used_bits_[id >> 6] &= ~(uint64_t{1} << (id & 63)); }

  int32_t num_blocks_;
  Level level_;
  int32_t fresh_ = 0;  // no id from here on was ever handed out or put on the stack
  int32_t num_used_ = 0, num_draining_ = 0;
  std::vector<BlockId> stack_;
  std::vector<uint64_t> used_bits_;
};

}  // namespace fastkv::core
