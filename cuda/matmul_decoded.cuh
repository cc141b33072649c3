// Matrices of codes that become f32, times one row of f32 or several.
#include "plain.h"

#define DECODED_KERNELS(name, codes)                                                                                \
  extern "C" __global__ void __launch_bounds__(plain_warps* lanes) matmul_each_##name(const ProductParams params) { \
    matmul_plain<codes, one_outputs, 1>(params);                                                                    \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(plain_warps* lanes) matmul_few_##name(const ProductParams params) {  \
    matmul_plain<codes, plain_outputs, few_rows>(params);                                                           \
  }
FOR_DECODED(DECODED_KERNELS)
