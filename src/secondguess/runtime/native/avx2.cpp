// The kernels for processors with AVX2 and fused multiplication, as nearly all x86 processors have had since 2013.
#include "decoder.h"
