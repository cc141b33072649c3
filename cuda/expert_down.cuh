// One matrix of the experts: down, or gate and up where they are stored in different ways.
#include "experts.h"

#define ONE_KERNEL(name, bits, steps) \
  EXPERT_KERNEL(expert_down_one_##name, (one_warps * lanes), (expert_one<bits, steps, false>))
FOR_ALL_FORMATS(ONE_KERNEL)
#define FEW_KERNEL(name, bits, steps) \
  EXPERT_KERNEL(expert_down_few_##name, (product_threads), (expert_few<bits, steps, false>))
FOR_OTHER_FORMATS(FEW_KERNEL)
#define KNOWN_KERNELS(name, bits, steps)                                                                         \
  EXPERT_KERNEL(expert_down_few_##name, (few_threads, few_short_blocks), (expert_few_known<bits, steps, false>)) \
  EXPERT_KERNEL(expert_down_many_##name, (many_threads, many_blocks),                                            \
                (expert_many<bits, steps, false, many_fragments>))                                               \
  EXPERT_KERNEL(expert_down_most_##name, (many_threads, most_blocks), (expert_many<bits, steps, false, most_fragments>))
FOR_KNOWN_FORMATS(KNOWN_KERNELS)

EXPERT_KERNEL(expert_down_one_0, (plain_warps * lanes), (expert_plain<0, plain_outputs, 1, false>))
EXPERT_KERNEL(expert_down_few_0, (plain_warps * lanes), (expert_plain<0, plain_outputs, plain_rows, false>))
