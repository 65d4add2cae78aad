// Kernels for processors with AVX2 and FMA, which nearly all x86 processors since 2013 have.
#include "decoder.h"
