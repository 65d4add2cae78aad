// Kernels for processors with AVX-512 and its bfloat16 products, and for AMX if the caller enables
// it.
#include "decoder.h"
#include "sampling.h"
