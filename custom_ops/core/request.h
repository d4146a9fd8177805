// Request: one open request's tokens, block table and hold.
//
//     blocks of the table:   [0, shared)   blocks of published nodes path[i], which the request's hold keeps
//                            [shared, ..)  blocks of its own: being computed, partial, or reserved for drafts
//     path:                  nodes of the leading blocks; longer than shared when a match found blocks on the host only
//
// The hold ends at path.back(). tokens are confirmed tokens only; digests are those of the leading blocks, on demand.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "prefix_index.h"
#include "sha256.h"

namespace fastkv::core {

// Token positions of one image.
struct Span {
  int64_t start, end;
};

// Request::load when the last one failed: those blocks hold anything, and may not be published.
constexpr int64_t kFailedLoad = -1;

// The fields that every call touches come first: two cache lines, with the id.
struct alignas(64) Request {
  std::string id;  // empty: this place of the RequestMap is free
  Row<NodeId> path;
  int64_t shared = 0;

  Row<BlockId> table;
  int64_t computed = 0;  // leading tokens whose KV is in the table's blocks
  int64_t load = 0;      // the transfer that writes blocks [shared, path.size()) of the table; 0: none, or kFailedLoad
  uint64_t epoch = 0;    // of the weights that its blocks are computed with
  int32_t place = 0;     // in the RequestMap
  uint8_t priority = 0;
  bool counted = false;  // a match of it is in the statistics

  Row<int32_t> tokens;
  int64_t counted_hits = 0;
  int64_t offered = 0;  // leading published blocks that were considered for a copy to the host
  std::vector<Extra> extras;
  std::vector<Span> images;
  std::vector<Digest> digests;
  double ttl_s = std::numeric_limits<double>::infinity();

  int64_t num_tokens() const { return tokens.size(); }
  int64_t num_blocks() const { return table.size(); }

  // Fetch the path, and what recycle() touches when the blocks were given back.
  void prefetch() const {
    const char* lines = reinterpret_cast<const char*>(this);
    for (size_t at = 64; at < sizeof(Request); at += 64) __builtin_prefetch(lines + at, 1);
    for (int64_t i = path.size() - 1; i >= 0 && i > path.size() - 128; i -= 16) __builtin_prefetch(path.data() + i);
  }

  // Take over what the parent has, up to its leading `blocks` blocks, which are shared.
  void continue_from(const Request& parent, int64_t blocks) {
    path.append(parent.path.data(), blocks);
    table.append(parent.table.data(), blocks);
    tokens = parent.tokens;
    shared = blocks;
    computed = parent.computed;
    epoch = parent.epoch;
    offered = parent.offered;
    extras = parent.extras;
    images = parent.images;
    digests = parent.digests;
    priority = parent.priority;
    ttl_s = parent.ttl_s;
    counted = true;  // its hits are the parent's
  }

  // Ready for another id, with the buffers' capacity kept.
  void recycle() {
    id.clear();
    path.clear();
    table.clear();
    tokens.clear();
    shared = computed = load = counted_hits = offered = 0;
    priority = 0;
    counted = false;
    extras.clear();
    images.clear();
    digests.clear();
    ttl_s = std::numeric_limits<double>::infinity();
  }
};

}  // namespace fastkv::core
