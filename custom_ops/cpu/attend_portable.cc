// The attention kernel for the portable instruction set.
#define FASTKV_ISA portable
#include "fastkv/attend.h"
#include "fastkv/isa_kernels.h"

namespace fastkv::FASTKV_ISA {

void fill_attention(KernelTable* table) {
  table->attend_scratch = &attend_scratch;
  table->attend_tile = &attend_tile;
}

}  // namespace fastkv::FASTKV_ISA
