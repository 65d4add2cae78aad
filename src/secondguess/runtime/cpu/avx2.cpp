// Kernels for processors with AVX2, FMA and F16C, which nearly all x86 processors since 2013 have.
#include "chain.h"
