#include "metal/attention_steps.h"

#include "metal/metal_commands.h"

namespace moeflux::metal {
namespace {

MetalCommands& of_metal(Commands& commands, const char* op) {
  auto* own = dynamic_cast<MetalCommands*>(&commands);
  if (!own) throw ArgumentError(concat("[", op, "] backend: expected metal, found another"));
  return *own;
}

ScoresParams params_of(const AttentionSteps& args) {
  return {.dim = static_cast<uint32_t>(args.dim),
          .kv_dim = static_cast<uint32_t>(args.kv_heads * args.dim),
          .length = static_cast<uint32_t>(args.scores.dim),
          .stride = static_cast<uint32_t>(args.scores.head_stride),
          .heads_per_kv = static_cast<uint32_t>(args.kv_heads ? args.scores.heads / args.kv_heads : 1),
          .scale = args.scale};
}

}  // namespace

void attention_scores(Commands& commands, const AttentionSteps& args) {
  MetalCommands& own = of_metal(commands, "attention_scores");
  own.op("attention_scores", [&] {
    own.dispatch({"attention", "attention_scores"}, params_of(args), {args.q, args.k, args.scores.view},
                 {static_cast<uint32_t>(args.scores.dim), static_cast<uint32_t>(args.scores.heads)});
  });
}

void attention_softmax(Commands& commands, const AttentionSteps& args) {
  MetalCommands& own = of_metal(commands, "attention_softmax");
  own.op("attention_softmax", [&] {
    own.dispatch({"attention", "attention_softmax"}, params_of(args), {args.scores.view},
                 {static_cast<uint32_t>(args.scores.heads)});
  });
}

void attention_values(Commands& commands, const AttentionSteps& args) {
  MetalCommands& own = of_metal(commands, "attention_values");
  own.op("attention_values", [&] {
    own.flat({"attention", "attention_values"}, params_of(args), {args.scores.view, args.v, args.out}, args.dim,
             args.scores.heads);
  });
}

}  // namespace moeflux::metal
