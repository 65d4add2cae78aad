// Kernels for 64-bit ARM processors with dot products of 8-bit numbers.
#include "chain.h"
