// The attention kernel for the avx512 instruction set.
#define FASTKV_ISA avx512
#include "fastkv/attend_piece.h"
