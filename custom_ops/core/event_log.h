// EventLog: which blocks became findable at a level, or ceased to be, since somebody last asked.
//
// Layout: records in order of time. A stored record names its node until it is resolved, that is until the digest, the
// parent's digest and the tokens were copied; the digests are then computed for all records at once. That happens when
// somebody takes the events, after the step that caused them was launched, or when a node with an unresolved record
// is about to leave. In a full pool those that leave were resolved long ago.
//
//     attach --> stored (unresolved) --take, or node leaves--> stored (resolved) --take--> gone
//     detach --> removed                                                        --take--> gone
//     invalidate --> everything before it is dropped, cleared
//
// A log that nobody reads is dropped when it is full; the next reader gets "cleared" and all blocks that are findable
// then.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sha256.h"
#include "types.h"

namespace fastkv::core {

struct Event {
  enum Kind : uint8_t { kStored, kRemoved, kCleared };
  explicit Event(Kind what, Level where = kDevice) : kind(what), level(where) {}

  Kind kind;
  Level level;
  NodeId node = kNone;  // of a stored record that is not resolved yet
  bool has_parent = false;
  Digest digest{}, parent{};
  std::vector<int32_t> tokens;
  std::string extra, root_extra;  // identity bytes of this block, and of the first block of its prefix
};

struct EventLog {
  static constexpr size_t kMaxRecords = size_t{1} << 17;
  std::vector<Event> records;
  size_t num_resolved = 0;  // leading records that are resolved
  bool overflowed = false;
};

}  // namespace fastkv::core
