// Kernels for processors with AVX-512 and its bfloat16 products, and for AMX if the caller enables
// it.
#include "chain.h"
