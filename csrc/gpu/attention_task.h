// Attention in either of its forms, as the kernels of both GPUs take it.
#pragma once

#include <cstdint>

#include "backend/backend.h"

namespace moeflux::gpu {

// What the names of kernels call the type of cached rows.
inline const char* type_of(const Cache& rows) {
  return rows.dtype == DType::i8 ? "codes" : rows.dtype == DType::bf16 ? "bf16" : "f32";
}

struct AttentionTask {
  Heads q;
  Heads q_pe;  // empty without a positional part of its own
  Cache k;
  Cache v;
  Cache k_pe;
  int64_t kv_heads = 1;
  int64_t first_position = 0;
  float scale = 0;
  View out;
  View sinks;  // empty without any
  int64_t window = 0;

  static AttentionTask of(const AttentionArgs& args) {
    return {.q = args.q,
            .q_pe = {},
            .k = args.k,
            .v = args.v,
            .k_pe = {},
            .kv_heads = args.kv_heads,
            .first_position = args.first_position,
            .scale = args.scale,
            .out = args.out,
            .sinks = args.sinks,
            .window = args.window};
  }
  // All heads share one row of latents, which is key and value.
  static AttentionTask of(const LatentAttentionArgs& args) {
    return {.q = args.q_latent,
            .q_pe = args.q_pe,
            .k = args.latent,
            .v = args.latent,
            .k_pe = args.k_pe,
            .kv_heads = 1,
            .first_position = args.first_position,
            .scale = args.scale,
            .out = args.out,
            .sinks = {},
            .window = 0};
  }
};

}  // namespace moeflux::gpu
