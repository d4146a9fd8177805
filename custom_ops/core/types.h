// Words that every file of the scheduler core shares: ids, levels, errors.
//
// The core keeps books about KV cache blocks; it never touches cache memory. It knows neither Python nor Paddle:
// bindings.cc is the only file that includes pybind11.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastkv::core {

using BlockId = int32_t;
using NodeId = int32_t;

constexpr int64_t kMaxTokens = INT32_MAX;  // of a request
constexpr int32_t kNone = -1;

enum Level : int { kDevice = 0, kHost = 1 };
constexpr int kLevels = 2;
inline const char* level_name(int level) { return level == kDevice ? "device" : "host"; }

// The caller of one request asked for something it cannot have; nothing was changed.
struct RequestFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An invariant does not hold: a bug of the core.
struct InvariantFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Fewer blocks are free or evictable than asked for; nothing was changed.
struct OutOfBlocksFault : std::runtime_error {
  OutOfBlocksFault(int64_t asked, int64_t left, int64_t total, int at)
      : std::runtime_error("out of blocks"), requested(asked), available(left), num_blocks(total), level(at) {}
  int64_t requested, available, num_blocks;
  int level;
};

}  // namespace fastkv::core
