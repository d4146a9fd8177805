// The attention kernel for the avx512 instruction set.
#define FASTKV_ISA avx512
#include "fastkv/attend_piece.h"
#include "fastkv/isa_kernels.h"

namespace fastkv::FASTKV_ISA {

void fill_attention(KernelTable* table) {
  table->tile_rows = &tile_rows;
  table->attend_scratch = &attend_scratch;
  table->attend_piece = &attend_piece;
  table->merge_pieces = &merge_pieces;
}

}  // namespace fastkv::FASTKV_ISA
