// What writes a step's rows into its caches. Called by launch.cc before it attends; write_cache in cache_rows.cc is the
// same without rotary embedding.
#pragma once

#include "fastkv/params.h"
#include "fastkv/status.h"

namespace fastkv {

/// Writes rows k and v into the slots >= 0, which the caller has checked; v.data may be null. Keys are rotated first if
/// rope.cos is not null, token t by the angles of positions[t].
Status write_rows(const RowsView& k, const RowsView& v, const CacheView& key, const CacheView& value,
                  const int64_t* slots, int64_t num_tokens, const RopeView& rope, const int64_t* positions);

}  // namespace fastkv
