// Experts in GGUF's blocks.
#include "experts.h"

instantiate_blocks("expert_gate_up_1", expert_gate_up, 1) instantiate_blocks("expert_gate_up", expert_gate_up, 4)
    instantiate_blocks("expert_down_1", expert_down, 1) instantiate_blocks("expert_down", expert_down, 4)
