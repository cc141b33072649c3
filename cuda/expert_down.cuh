// One matrix of the experts: down, or gate and up where they are stored in different ways.
#include "experts.h"

#define EXPERT_KERNELS(name, bits, steps)                                                   \
  EXPERT_KERNEL(expert_down_one_##name, one_warps* lanes, (expert_one<bits, steps, false>)) \
  EXPERT_KERNEL(expert_down_few_##name, product_threads, (expert_some<bits, steps, few, false>))
FOR_ALL_FORMATS(EXPERT_KERNELS)
#define MANY_KERNEL(name, bits, steps) \
  EXPERT_KERNEL(expert_down_many_##name, product_threads, (expert_some<bits, steps, many, false>))
FOR_KNOWN_FORMATS(MANY_KERNEL)

EXPERT_KERNEL(expert_down_one_0, plain_warps* lanes, (expert_plain<0, plain_outputs, 1, false>))
EXPERT_KERNEL(expert_down_few_0, plain_warps* lanes, (expert_plain<0, plain_outputs, plain_rows, false>))
