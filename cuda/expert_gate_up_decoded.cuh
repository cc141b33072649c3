// Gate and up of the experts, as in expert_gate_up.cuh, where codes become f32.
#include "experts.h"

#define DECODED_KERNELS(name, codes)                                                                           \
  EXPERT_KERNEL(expert_gate_up_one_##name, (plain_warps * lanes), (expert_plain<codes, one_outputs, 1, true>)) \
  EXPERT_KERNEL(expert_gate_up_few_##name, (plain_warps * lanes), (expert_plain<codes, plain_outputs, few_rows, true>))
FOR_DECODED(DECODED_KERNELS)
