// One matrix of the experts, as in expert_down.cuh, where codes become f32.
#include "experts.h"

#define DECODED_KERNELS(name, codes)                                                                         \
  EXPERT_KERNEL(expert_down_one_##name, (plain_warps * lanes), (expert_plain<codes, one_outputs, 1, false>)) \
  EXPERT_KERNEL(expert_down_few_##name, (plain_warps * lanes), (expert_plain<codes, plain_outputs, few_rows, false>))
FOR_DECODED(DECODED_KERNELS)
