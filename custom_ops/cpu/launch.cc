// CPU launchers: check ids, split the work over OpenMP threads, call the kernels of the instruction set in use.
// Nothing inside a parallel region throws or allocates.
#include "fastkv/launch.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cache_rows.h"
#include "checks.h"
#include "fastkv/kernel_table.h"
#include "scratch.h"

namespace fastkv {

namespace {

// Below this many multiply-adds of attention, waking threads costs more than it saves: some 30 to 60 us on one core. A
// sleeping thread is there in 10 us on an idle machine, but a busy machine takes milliseconds, and a decode step has a
// call for every layer.
constexpr double kParallelProducts = 1 << 19;

thread_local ThreadScratch thread_scratch;

std::unique_ptr<int64_t[]> token_positions(const BatchView& batch) {
  std::unique_ptr<int64_t[]> positions(new (std::nothrow) int64_t[static_cast<size_t>(batch.num_tokens + 1)]);
  if (positions == nullptr) return positions;
  for (int64_t r = 0; r < batch.batch; ++r) {
    for (int64_t t = batch.query_start[r]; t < batch.query_start[r + 1]; ++t) {
      positions[t] = static_cast<int64_t>(batch.context_lens[r]) + t - batch.query_start[r];
    }
  }
  for (int64_t t = batch.query_start[batch.batch]; t < batch.num_tokens; ++t) positions[t] = 0;  // padding
  return positions;
}

// A call should have this many pieces, so that many cores share even one long request. Never derived from the number
// of threads: a result must not depend on it.
constexpr int64_t kWantedPieces = 64;
// Positions of a piece: enough to outweigh a merge (some 3 us), and a multiple of what kernels take at once; for the
// few rows of a decode step, few enough that float32 sums over them stay exact to about 1e-6. At 1024 positions of
// three kv heads, 512 lets two threads share evenly what whole heads do not.
constexpr int64_t kMinPiece = 512;
constexpr int64_t kMaxPiece = 8192;
constexpr int64_t kPieceStep = 64;
constexpr int64_t kFewRows = 16;

/// The work of one call: tiles of all (request, kv head) pairs, the large ones cut into pieces over their positions.
struct WorkList {
  struct Merge {
    AttendTask tile;
    size_t first_piece;
    int64_t pieces;
  };
  std::vector<AttendTask> pieces;
  std::vector<Merge> merges;
  std::vector<int64_t> merge_of;               // by piece: its place in merges, or -1
  std::vector<std::atomic<int64_t>> finished;  // by merge: pieces that are done
  int64_t longest = 0;                         // rows of the largest tile
  double products = 0.0;                       // of queries and positions, for the decision whether to use threads
  int64_t partial_floats = 0;
};

/// Tiles of at most tile_rows rows; within a request the last, which reads most, comes first.
std::vector<AttendTask> list_tiles(const AttentionParams& p, int64_t tile_rows) {
  const BatchView& batch = p.batch;
  const int64_t group = p.q.heads / p.key.kv_heads;
  std::vector<AttendTask> tiles;
  tiles.reserve(static_cast<size_t>(batch.batch * p.key.kv_heads));
  for (int64_t r = 0; r < batch.batch; ++r) {
    const int64_t rows = static_cast<int64_t>(batch.query_start[r + 1] - batch.query_start[r]) * group;
    const int64_t context = batch.context_lens[r];
    const int64_t count = (rows + tile_rows - 1) / tile_rows;
    const auto bound = [&](int64_t i) { return i == count ? rows : rows * i / count / 6 * 6; };  // see kBlockRows
    for (int64_t i = count - 1; i >= 0; --i) {
      const int64_t first = bound(i), end = bound(i + 1);
      const int64_t own = context + first / group;  // position of the first row
      const int64_t begin = p.window > 0 ? std::max<int64_t>(own + 1 - p.window, 0) : 0;
      for (int64_t head = 0; head < p.key.kv_heads; ++head) {
        tiles.push_back({r, head, first, end, begin, context + (end - 1) / group + 1, nullptr});
      }
    }
  }
  return tiles;
}

WorkList list_work(const AttentionParams& p, int64_t tile_rows) {
  WorkList work;
  const std::vector<AttendTask> tiles = list_tiles(p, tile_rows);
  double total = 0.0;
  const auto size_of = [](const AttendTask& t) {
    return static_cast<double>(t.row_end - t.row_begin) * static_cast<double>(t.pos_end - t.pos_begin);
  };
  for (const AttendTask& tile : tiles) total += size_of(tile);
  work.products = total;
  work.pieces.reserve(tiles.size() + kWantedPieces);
  work.merge_of.reserve(tiles.size() + kWantedPieces);
  for (const AttendTask& tile : tiles) {
    const int64_t rows = tile.row_end - tile.row_begin, positions = tile.pos_end - tile.pos_begin;
    work.longest = std::max(work.longest, rows);
    int64_t count = static_cast<int64_t>(size_of(tile) / total * kWantedPieces);
    if (rows <= kFewRows) count = std::max(count, (positions + kMaxPiece - 1) / kMaxPiece);
    count = std::max<int64_t>(std::min(count, (positions + kMinPiece / 2) / kMinPiece), 1);
    if (count > 1) {
      work.merges.push_back({tile, work.pieces.size(), count});
      work.partial_floats += count * rows * partial_stride(p.out.dim);
    }
    const auto bound = [&](int64_t i) {
      return i == count ? tile.pos_end : tile.pos_begin + positions * i / count / kPieceStep * kPieceStep;
    };
    for (int64_t i = 0; i < count; ++i) {
      AttendTask piece = tile;
      piece.pos_begin = bound(i);
      piece.pos_end = bound(i + 1);
      work.pieces.push_back(piece);
      work.merge_of.push_back(count > 1 ? static_cast<int64_t>(work.merges.size()) - 1 : -1);
    }
  }
  work.finished = std::vector<std::atomic<int64_t>>(work.merges.size());
  for (std::atomic<int64_t>& count : work.finished) count.store(0);
  return work;
}

/// Gives the pieces of cut tiles their part of `memory`.
void place_partials(const AttentionParams& p, WorkList* work, float* memory) {
  for (WorkList::Merge& merge : work->merges) {
    merge.tile.partial = memory;
    for (int64_t i = 0; i < merge.pieces; ++i) {
      work->pieces[merge.first_piece + static_cast<size_t>(i)].partial = memory;
      memory += (merge.tile.row_end - merge.tile.row_begin) * partial_stride(p.out.dim);
    }
  }
}

}  // namespace

Status append_attention(const AttentionParams& params) {
  const BatchView& batch = params.batch;
  Status status = check_batch(batch, params.key, params.rope, params.window);
  if (!status.ok()) return status;

  const KernelTable& table = kernels();
  WorkList work;
  try {
    work = list_work(params, table.tile_rows(params));
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  }
  const std::unique_ptr<int64_t[]> positions = token_positions(batch);
  if (positions == nullptr) return out_of_memory();
  const int64_t scratch_floats = table.attend_scratch(params, work.longest);
  const int64_t num_pieces = static_cast<int64_t>(work.pieces.size());
  const double elements = work.products * static_cast<double>(params.key.dim + params.out.dim);
  const int wanted = elements < kParallelProducts ? 1 : omp_get_max_threads();
  const int threads = static_cast<int>(std::min<int64_t>(wanted, std::max<int64_t>(num_pieces, 1)));
  float* scratch = thread_scratch.floats(scratch_floats * threads + work.partial_floats);
  if (scratch == nullptr) return out_of_memory();
  place_partials(params, &work, scratch + scratch_floats * threads);

  status = write_rows(params.k, params.v, params.key, params.value, batch.slot_mapping, batch.num_tokens, params.rope,
                      positions.get());
  if (!status.ok()) return status;

  std::atomic<int64_t> next{0};
  // Whoever finishes the last piece of a tile merges them: a barrier would be one more wait for a thread that the
  // system may not be running.
  const auto attend_pieces = [&](float* own) {
    for (int64_t i = next++; i < num_pieces; i = next++) {
      table.attend_piece(params, table, work.pieces[static_cast<size_t>(i)], own);
      const int64_t at = work.merge_of[static_cast<size_t>(i)];
      if (at < 0) continue;
      const WorkList::Merge& merge = work.merges[static_cast<size_t>(at)];
      if (work.finished[static_cast<size_t>(at)].fetch_add(1) + 1 < merge.pieces) continue;
      table.merge_pieces(params, table, merge.tile, merge.pieces, own);
    }
  };
  if (threads == 1) {
    attend_pieces(scratch);
  } else {
#pragma omp parallel num_threads(threads)
    attend_pieces(scratch + omp_get_thread_num() * scratch_floats);
  }
  const int64_t used = batch.query_start[batch.batch];
  const int64_t row_bytes = params.out.heads * params.out.dim * dtype_bytes(params.out.dtype);
  if (used < batch.num_tokens) {
    std::memset(params.out.data + used * row_bytes, 0, static_cast<size_t>((batch.num_tokens - used) * row_bytes));
  }
  return {};
}

}  // namespace fastkv
