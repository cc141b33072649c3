// Matrices of codes that become f32, times one row of f32 or several.
#include "plain.h"

#define DECODED_KERNELS(name, codes)                                                                      \
  KERNEL(matmul_each_##name, ProductParams, (plain_warps * lanes), (matmul_plain<codes, one_outputs, 1>)) \
  KERNEL(matmul_few_##name, ProductParams, (plain_warps * lanes), (matmul_plain<codes, plain_outputs, few_rows>))
FOR_DECODED(DECODED_KERNELS)
