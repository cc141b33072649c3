// Where a call's intermediate numbers lie: fixed at open for the largest chunk, shared by all sessions of an engine,
// which take turns. n is the rows of the call, at most `rows`. f32 unless said.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "core/variant.h"

namespace moeflux {

// Tokens of a call whose picks of the next layer are guessed.
constexpr int64_t most_guess_rows = 64;

struct Scratch {
  int64_t rows = 0;  // the largest chunk

  View tokens;  // i32 [n]
  View angles;  // [n, rotary_dim / 2, 2]
  View hidden;  // [n, hidden]: the residual stream
  View normed;  // [n, hidden]
  View mixed;   // [n, widest input of an out projection]: what attention yields
  View out;     // [n, hidden]

  // Gated delta-net.
  View qkv;        // [n, conv_channels]
  View convolved;  // [n, conv_channels]
  View z;          // [n, value heads * value dim]
  View alpha;      // [n, value heads]
  View b;          // [n, value heads]
  View decay;      // [n, value heads]
  View beta;       // [n, value heads]

  // Full attention; k and v for grouped queries, the others for latent attention.
  View q;         // [n, heads * dim, or twice that with a gate]
  View k;         // [n, kv_heads * dim]
  View v;         // [n, kv_heads * dim]
  View q_low;     // [n, q_lora_rank]
  View kv;        // [n, rank + rope]
  View q_latent;  // [n, heads, rank]
  View latents;   // [n, heads, rank]

  // Feed-forward: dense layers and the shared expert.
  View gate;         // [n, widest intermediate]
  View up;           // [n, widest intermediate]
  View shared;       // [n, hidden]
  View shared_gate;  // [n]

  // Routed experts.
  View router;          // [n, experts]
  View ids;             // i32 [n, k]
  View weights;         // [n, k]
  View expert_scratch;  // [n * k, 2 * moe_intermediate]
  View expert_out;      // [n * k, hidden]

  // The look-ahead, of the first m rows, at most most_guess_rows.
  View guess_normed;   // [m, hidden]
  View guess_router;   // [m, experts]
  View guess_ids;      // i32 [m, k]
  View guess_weights;  // [m, k]

  // Logits of several rows at a time, where all are asked for.
  int64_t logit_rows = 0;
  View logits;  // [logit_rows, vocab]

  std::vector<Product> products;  // on the host: one a head of latent attention, kept to be reused

  std::unique_ptr<Buffer> arena;
};

// Bytes of the arena for chunks of `rows` tokens.
int64_t scratch_bytes(const Variant& variant, int64_t rows);

Scratch make_scratch(const Variant& variant, int64_t rows, Backend& backend);

}  // namespace moeflux
