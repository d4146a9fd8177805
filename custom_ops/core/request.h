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

struct Request {
  Row<int32_t> tokens;
  std::vector<Extra> extras;
  std::vector<Span> images;
  Row<NodeId> path;
  Row<BlockId> table;
  std::vector<Digest> digests;
  int64_t shared = 0;
  int64_t computed = 0;  // leading tokens whose KV is in the table's blocks
  uint64_t epoch = 0;    // of the weights that its blocks are computed with
  bool counted = false;  // a match of it is in the statistics
  int64_t counted_hits = 0;
  int64_t offered = 0;  // leading published blocks that were considered for a copy to the host
  int64_t load = 0;     // the transfer that writes blocks [shared, path.size()) of the table; 0: none
  uint8_t priority = 0;
  double ttl_s = std::numeric_limits<double>::infinity();

  int64_t num_tokens() const { return tokens.size(); }
  int64_t num_blocks() const { return table.size(); }

  // Ready for another id, with the buffers' capacity kept.
  void recycle() {
    tokens.clear();
    path.clear();
    table.clear();
    extras.clear();
    images.clear();
    digests.clear();
    shared = computed = counted_hits = offered = load = 0;
    counted = false;
    priority = 0;
    ttl_s = std::numeric_limits<double>::infinity();
  }
};

}  // namespace fastkv::core
