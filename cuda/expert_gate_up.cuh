// Gate and up of the experts, and what becomes of both.
#include "experts.h"

#define ONE_KERNEL(name, bits, steps) \
  EXPERT_KERNEL(expert_gate_up_one_##name, (one_warps * lanes), (expert_one<bits, steps, true>))
FOR_ALL_FORMATS(ONE_KERNEL)
#define FEW_KERNEL(name, bits, steps) \
  EXPERT_KERNEL(expert_gate_up_few_##name, (product_threads), (expert_few<bits, steps, true>))
FOR_OTHER_FORMATS(FEW_KERNEL)
#define KNOWN_KERNELS(name, bits, steps)                                                                     \
  EXPERT_KERNEL(expert_gate_up_few_##name, (few_threads, few_blocks), (expert_few_known<bits, steps, true>)) \
  EXPERT_KERNEL(expert_gate_up_many_##name, (many_threads, many_blocks),                                     \
                (expert_many<bits, steps, true, many_fragments>))                                            \
  EXPERT_KERNEL(expert_gate_up_most_##name, (many_threads, most_blocks),                                     \
                (expert_many<bits, steps, true, most_fragments>))
FOR_KNOWN_FORMATS(KNOWN_KERNELS)

EXPERT_KERNEL(expert_gate_up_one_0, (plain_warps * lanes), (expert_plain<0, plain_outputs, 1, true>))
EXPERT_KERNEL(expert_gate_up_few_0, (plain_warps * lanes), (expert_plain<0, plain_outputs, plain_rows, true>))
