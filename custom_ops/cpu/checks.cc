#include "checks.h"

namespace fastkv {

namespace {

using ll = long long;

Status check_request(const BatchView& batch, const CacheView& cache, const RopeView& rope, int64_t window,
                     int64_t request) {
  const int64_t queries = batch.query_start[request + 1] - batch.query_start[request];
  const int64_t context = batch.context_lens[request];
  if (context < 0) {
    return refuse(StatusCode::kInvalidArgument,
                  "context_lens[%lld] is %lld; it counts the tokens in the cache before this step, 0 or more",
                  (ll)request, (ll)context);
  }
  if (queries == 0) return {};
  const int64_t end = context + queries;
  if (rope.cos != nullptr && end > rope.max_position) {
    return refuse(StatusCode::kOutOfRange,
                  "request %lld reaches position %lld, but the rotary tables end at %lld: build longer tables or "
                  "shorten the request",
                  (ll)request, (ll)(end - 1), (ll)(rope.max_position - 1));
  }
  const int64_t start = window > 0 && context + 1 > window ? context + 1 - window : 0;
  const int64_t last_block = (end - 1) / cache.block_size;
  if (last_block >= batch.max_blocks) {
    return refuse(StatusCode::kInvalidArgument,
                  "request %lld needs %lld blocks of %lld tokens for %lld positions, but block_tables has %lld columns",
                  (ll)request, (ll)(last_block + 1), (ll)cache.block_size, (ll)end, (ll)batch.max_blocks);
  }
  const int32_t* table = batch.block_tables + request * batch.max_blocks;
  for (int64_t i = start / cache.block_size; i <= last_block; ++i) {
    if (table[i] < 0 || table[i] >= cache.num_blocks) {
      return refuse(StatusCode::kOutOfRange,
                    "block_tables[%lld][%lld] is %d, which request %lld reads (%lld positions); the cache has blocks 0 "
                    "to %lld",
                    (ll)request, (ll)i, table[i], (ll)request, (ll)end, (ll)(cache.num_blocks - 1));
    }
  }
  return {};
}

}  // namespace

Status check_slots(const int64_t* slots, int64_t count, const CacheView& cache, int64_t lowest) {
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < lowest || slots[i] >= num_slots) {
      return refuse(StatusCode::kOutOfRange,
                    "slot %lld of token %lld is out of range: %lld blocks of %lld tokens have slots 0 to %lld%s",
                    (ll)slots[i], (ll)i, (ll)cache.num_blocks, (ll)cache.block_size, (ll)(num_slots - 1),
                    lowest < 0 ? ", and -1 means: don't write" : "");
    }
  }
  return {};
}

Status check_batch(const BatchView& batch, const CacheView& cache, const RopeView& rope, int64_t window) {
  if (batch.query_start[0] != 0) {
    return refuse(StatusCode::kInvalidArgument, "query_start[0] is %d; it must be 0", batch.query_start[0]);
  }
  for (int64_t r = 0; r < batch.batch; ++r) {
    if (batch.query_start[r + 1] < batch.query_start[r]) {
      return refuse(StatusCode::kInvalidArgument, "query_start[%lld] is %d, less than query_start[%lld] = %d",
                    (ll)(r + 1), batch.query_start[r + 1], (ll)r, batch.query_start[r]);
    }
  }
  const int64_t used = batch.query_start[batch.batch];
  if (used > batch.num_tokens) {
    return refuse(StatusCode::kInvalidArgument, "query_start ends at %lld, but q has %lld tokens", (ll)used,
                  (ll)batch.num_tokens);
  }
  for (int64_t r = 0; r < batch.batch; ++r) {
    const Status status = check_request(batch, cache, rope, window, r);
    if (!status.ok()) return status;
  }
  const Status status = check_slots(batch.slot_mapping, batch.num_tokens, cache, -1);
  if (!status.ok()) return status;
  for (int64_t t = used; t < batch.num_tokens; ++t) {
    if (batch.slot_mapping[t] != -1) {
      return refuse(StatusCode::kInvalidArgument,
                    "token %lld is padding (query_start ends at %lld), but its slot is %lld; padding has slot -1",
                    (ll)t, (ll)used, (ll)batch.slot_mapping[t]);
    }
  }
  return {};
}

}  // namespace fastkv
