// Checks on the contents of id arrays, before anything is written.
#pragma once

#include "fastkv/params.h"
#include "fastkv/status.h"

namespace fastkv {

/// Slots are in [lowest, num_slots): lowest is -1 where "don't write" is allowed, else 0.
Status check_slots(const int64_t* slots, int64_t count, const CacheView& cache, int64_t lowest);

/// query_start ascends from 0 to at most num_tokens, lengths are not negative, padding tokens have slot -1, positions
/// are inside the rotary tables, and every block that will be read is in range.
Status check_batch(const BatchView& batch, const CacheView& cache, const RopeView& rope, int64_t window);

}  // namespace fastkv
