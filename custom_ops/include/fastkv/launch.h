// The framework-free front door: what bindings and standalone tests call. Every function checks what depends on the
// contents (ids, lengths, positions) before it writes anything, then runs on the caller's OpenMP threads.
// Shapes, dtypes and pointers are the caller's to check.
#pragma once

#include "fastkv/params.h"
#include "fastkv/status.h"

namespace fastkv {

/// Quantises rows k and v into the slots >= 0. v.data may be null (latent caches have no value).
Status write_cache(const RowsView& k, const RowsView& v, const CacheView& key, const CacheView& value,
                   const int64_t* slots, int64_t num_tokens);

/// Writes this step's k and v into the cache, then attends every query over what the cache holds.
Status append_attention(const AttentionParams& params);

/// Dequantises the rows at `slots` (all >= 0) of one cache tensor into out, float32 [num_slots, kv_heads, dim].
Status gather_cache(const CacheView& cache, const int64_t* slots, int64_t num_slots, float* out);

/// One tensor seen as blocks of bytes.
struct BlocksView {
  char* data = nullptr;
  int64_t num_blocks = 0;
  int64_t block_bytes = 0;
};

/// Copies block src_ids[i] over block dst_ids[i] in every tensor. No dst may be a src or occur twice.
Status copy_blocks(const BlocksView* tensors, int64_t num_tensors, const int64_t* src_ids, const int64_t* dst_ids,
                   int64_t num_copies);

/// Instruction sets that kernels were compiled for; kBest asks for the best one that this CPU runs. kAvx2Normal is
/// kAvx2 for CPUs that are slow with subnormal numbers. kAvx512 is AVX-512 F, BW, VL and DQ, kAvx512Vnni adds VNNI.
enum class Isa : int { kBest = -1, kPortable = 0, kAvx2, kAvx2Normal, kAvx512, kAvx512Vnni, kCount };

/// Its name, for people and for Python.
const char* isa_name(Isa isa);

/// Whether this build has kernels for it, this CPU runs them, and the system keeps their registers.
bool has_isa(Isa isa);

/// The instruction set in use.
Isa current_isa();

/// Forces one; false if this build or this CPU lacks it. Not for use while an op runs.
bool force_isa(Isa isa);

}  // namespace fastkv
