// Block records: moving blocks between the device's tensors and contiguous host records. Bytes only, no dtypes.
//
//     device, one tensor a part      | block 0 | block 1 | block 2 | ...        block_stride apart, bytes of each used
//     host, one record a block       | part 0 | part 1 | ... | padding |        record_stride apart, part at its offset
//
// All offsets are 64-bit. Parts, ids and records are the caller's; source and destination memory must not overlap.
// A copy runs on the calling thread and on a CopyPool's, outside any lock of the caller's (Python's GIL included), and
// never on OpenMP's threads: those spin after a parallel region and would take the cores from a forward step beside it.
#pragma once

#include <cstdint>

#include "fastkv/status.h"

namespace fastkv {

/// One role of one layer. Passed from Python as four consecutive int64.
struct RecordPart {
  char* device;          // block 0 of the tensor
  int64_t block_stride;  // bytes from one block to the next
  int64_t bytes;         // of one block
  int64_t offset;        // inside a record
};
static_assert(sizeof(RecordPart) == 4 * sizeof(int64_t), "Python builds the table as int64 [n, 4]");

/// Host memory that holds records.
struct RecordsView {
  char* data = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
};

enum class RecordDirection : int { kToHost = 0, kToDevice = 1 };

/// Threads that help with copies; they sleep while there is nothing to do. One copy at a time uses the pool, a second
/// caller waits for it.
class CopyPool;

/// A pool of 1 to 256 threads, the caller of a copy included; null outside that, or if there is no memory or thread.
CopyPool* make_copy_pool(int threads);
void free_copy_pool(CopyPool* pool);

/// A large copy comes within some 100 us: one sleeping thread wakes and waits for it, for about as long.
void prepare_copy(CopyPool* pool);

/// Parts that land together, one group after another, and who is told. Without it all parts are one group.
struct LandingOrder {
  const int64_t* first_part = nullptr;  // [num_groups + 1], ascending, from 0 to the number of parts
  int64_t num_groups = 0;
  /// Called on the thread that called copy_records, between two pieces of its work, when so many leading groups have
  /// landed; at last with all of them. The threads do not wait for each other between groups.
  void (*landed)(int64_t num_groups) = nullptr;
};

/// For every i < count and every part: block device_ids[i] of the part's tensor <-> record record_ids[i].
/// Ids are checked first; destinations must differ. pool may be null: then the calling thread copies alone.
Status copy_records(CopyPool* pool, const RecordPart* parts, int64_t num_parts, int64_t num_device_blocks,
                    const RecordsView& records, const int32_t* device_ids, const int32_t* record_ids, int64_t count,
                    RecordDirection direction, const LandingOrder& order = {});

}  // namespace fastkv
