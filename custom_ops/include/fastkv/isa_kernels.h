// Body of the two sources that are compiled once an instruction set (cpu/codec_*.cc and cpu/attend_*.cc). They are
// apart because codecs need floating-point contraction off (codec.h) and attention wants it on.
#pragma once

#include "fastkv/kernel_table.h"

namespace fastkv::FASTKV_ISA {

void fill_codecs(KernelTable* table);     // codec_*.cc
void fill_attention(KernelTable* table);  // attend_*.cc

}  // namespace fastkv::FASTKV_ISA
