// The kernels for processors with AVX-512 and its bfloat16 products, and for AMX where the caller says it is there.
#include "decoder.h"
