// Codecs for the avx512 instruction set; setup.py compiles this file with contraction off.
#define FASTKV_ISA avx512
#include "fastkv/codec.h"
#include "fastkv/isa_kernels.h"

namespace fastkv::FASTKV_ISA {

void fill_codecs(KernelTable* table) { add_codecs(table); }

}  // namespace fastkv::FASTKV_ISA
