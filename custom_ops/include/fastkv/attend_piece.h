// The attention half of the kernel table: all of the sources that are compiled once an instruction set
// (cpu/attend_*.cc).
#pragma once

#include "fastkv/isa_kernels.h"
#include "fastkv/panels.h"
#include "fastkv/row_tile.h"

namespace fastkv::FASTKV_ISA {

/// Rows up to which reading stored bytes into registers again for every four rows beats packing panels. (Up to
/// kMaxKeyDim, that many queries stay in the first-level cache.)
inline constexpr int64_t kRowTileRows = 16;

static inline bool suits_row_tile(const AttentionParams& p, int64_t rows) {
  return rows <= kRowTileRows && p.key.dim <= kMaxKeyDim;
}

static int64_t tile_rows(const AttentionParams& p) {
  constexpr int64_t kFloats = 320 * 1024 / 4;  // well inside a second-level cache of half a megabyte
  const int64_t row = round_up(p.key.dim, kPanel) + round_up(p.out.dim, kPanel);
  const int64_t rows = (kFloats / row - kPanelKeys) / kBlockRows * kBlockRows;
  return larger(48, smaller(192, rows));
}

static int64_t attend_scratch(const AttentionParams& p, int64_t rows) {
  static float origin[1];  // nothing is written here: the carvers only count
  Carver few{origin}, many{origin};
  if (p.key.dim <= kMaxKeyDim) RowScratch(p, smaller(rows, kRowTileRows), &few);
  PanelScratch(p, rows, &many);
  return larger(few.used, many.used);
}

static void attend_piece(const AttentionParams& p, const KernelTable& table, const AttendTask& task, float* scratch) {
  const Tile tile(p, table, task);
  Carver carver{scratch};
  if (suits_row_tile(p, tile.rows)) {
    RowTile(tile, &carver).run();
  } else {
    PanelTile(tile, &carver).run();
  }
}

static void merge_pieces(const AttentionParams& p, const KernelTable& table, const AttendTask& task, int64_t pieces,
                         float* scratch) {
  const int64_t stride = partial_stride(p.out.dim);
  const int64_t dim = p.out.dim, state = round_up(dim, 8);
  const int64_t rows = task.row_end - task.row_begin;
  AttendTask whole = task;
  whole.partial = nullptr;
  const Tile tile(p, table, whole);
  for (int64_t row = 0; row < rows; ++row) {
    float maximum = minus_infinity();
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const float top = task.partial[(piece * rows + row) * stride + state];
      maximum = top > maximum ? top : maximum;
    }
    float sum = 0.0f;
    std::memset(scratch, 0, static_cast<size_t>(dim) * sizeof(float));
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const float* part = task.partial + (piece * rows + row) * stride;
      const float base = maximum == minus_infinity() ? 0.0f : maximum;
      const float weight = part[state] == base ? 1.0f : std::exp(part[state] - base);
      sum += part[state + 1] * weight;
      for (int64_t i = 0; i < dim; ++i) scratch[i] += part[i] * weight;
    }
    tile.finish(row, scratch, maximum, sum);
  }
}

void fill_attention(KernelTable* table) {
  table->tile_rows = &tile_rows;
  table->attend_scratch = &attend_scratch;
  table->attend_piece = &attend_piece;
  table->merge_pieces = &merge_pieces;
}

}  // namespace fastkv::FASTKV_ISA
