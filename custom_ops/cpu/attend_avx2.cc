// The attention kernel for the avx2 instruction set.
#define FASTKV_ISA avx2
#include "fastkv/attend_piece.h"
