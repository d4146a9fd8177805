// The attention kernel for the portable instruction set.
#define FASTKV_ISA portable
#include "fastkv/attend_piece.h"
