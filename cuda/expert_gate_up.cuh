// Gate and up of the experts, and what becomes of both.
#include "experts.h"

#define EXPERT_KERNELS(name, bits, steps)                                                     \
  EXPERT_KERNEL(expert_gate_up_one_##name, one_warps* lanes, (expert_one<bits, steps, true>)) \
  EXPERT_KERNEL(expert_gate_up_few_##name, product_threads, (expert_some<bits, steps, few, true>))
FOR_ALL_FORMATS(EXPERT_KERNELS)
#define MANY_KERNEL(name, bits, steps) \
  EXPERT_KERNEL(expert_gate_up_many_##name, product_threads, (expert_some<bits, steps, many, true>))
FOR_KNOWN_FORMATS(MANY_KERNEL)

EXPERT_KERNEL(expert_gate_up_one_0, plain_warps* lanes, (expert_plain<0, plain_outputs, 1, true>))
EXPERT_KERNEL(expert_gate_up_few_0, plain_warps* lanes, (expert_plain<0, plain_outputs, plain_rows, true>))
