// One query's attention in the three steps that the older engine had, the scores in memory between them; its fourth,
// the gate, is sigmoid_gate. Ops of Metal alone, that models do without: `commands` are of a MetalBackend, or
// StateError.
#pragma once

#include "backend/backend.h"

namespace moeflux::metal {

struct AttentionSteps {
  View q;           // [heads, dim]
  View k;           // f32 [length, kv_heads, dim]
  View v;           // the same
  int64_t dim = 0;  // of a head
  int64_t kv_heads = 0;
  float scale = 0;
  Heads scores;  // one row: a head's `dim` are its scores, one a cached row
  View out;      // [heads, dim]
};

void attention_scores(Commands& commands, const AttentionSteps& args);   // q, k -> scores
void attention_softmax(Commands& commands, const AttentionSteps& args);  // scores, in place
void attention_values(Commands& commands, const AttentionSteps& args);   // scores, v -> out

}  // namespace moeflux::metal
