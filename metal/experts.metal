// Experts of packed codes and of plain elements, and their blocks of pairs where the GPU chose them.
#include "experts.h"

// Makes the blocks of pairs whose experts were chosen on the GPU, one pair in each. Grid of threads: pairs.
kernel void expert_blocks(constant ExpertBlocksParams& params [[buffer(0)]], device const int* ids [[buffer(1)]],
                          device const ulong* slots [[buffer(2)]], device ExpertBlock* blocks [[buffer(3)]],
                          device uint* pairs [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  if (i >= params.count) return;
  blocks[i].slot = slots[ids[i]];
  blocks[i].first = i;
  blocks[i].count = 1;
  blocks[i].expert = uint(ids[i]);
  pairs[i] = i;
}

instantiate_formats("expert_gate_up_1", expert_gate_up, 1)
instantiate_formats("expert_gate_up", expert_gate_up, 4)
instantiate_formats("expert_down_1", expert_down, 1)
instantiate_formats("expert_down", expert_down, 4)
