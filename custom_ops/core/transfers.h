// Transfers: copies between levels that the manager planned and that no rank, or not every rank, has acknowledged.
//
//     begin_offload      device -> host, blocks of one open request         (write through)
//     begin_write_back   device -> host, the next victims of the device     (write back)
//     begin_load         host -> device, what match found on the host, into the request's own blocks
//     begin_fetch        storage -> host, blocks after what match found; nodes that nobody finds until they landed
//     store_landed       host -> storage, of what an offload just brought to the host
//
//     begin_* --> in flight --end_transfer(landed)--> over      landed: as many leading blocks arrived on every rank
//
// While a transfer is in flight both ends belong to it: the nodes are in a copy (prefix_index_copies.cc), blocks that
// are being written are nobody else's. A request may be preempted or released meanwhile, the weights may change, the
// cache may be reset: then what lands is thrown away, or kept if it is still right. Nothing is findable before it
// landed; a transfer of which nothing landed leaves the books as if it had not begun.
#pragma once

#include <vector>

#include "types.h"

namespace fastkv::core {

struct Request;

enum class TransferKind { kOffload, kLoad, kFetch, kStore };

struct Transfer {
  TransferKind kind = TransferKind::kOffload;
  std::vector<NodeId> nodes;
  std::vector<BlockId> device, host;  // empty where that level takes no part
  Request* request = nullptr;         // of a load, as long as the request keeps the blocks
};

// A new transfer, for whoever plans the copies; id 0: there is nothing to move, and nothing was begun.
struct BegunTransfer {
  int64_t id = 0;
  std::vector<NodeId> nodes;
  std::vector<BlockId> device, host;
};

}  // namespace fastkv::core
