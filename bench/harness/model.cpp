#include "model.h"

namespace bench {

moeflux::EngineOptions engine_options(const Arguments& arguments, int64_t threads) {
  moeflux::EngineOptions options;
  options.backend = arguments.backend;
  options.isa = arguments.isa;
  options.precision = arguments.precision;
  options.threads = static_cast<int>(threads);
  options.readers = static_cast<int>(arguments.readers);
  options.expert_slots = arguments.slots;
  options.host_slots = arguments.host_slots;
  options.reads = arguments.reads;
  options.cache = arguments.cache;
  options.look_ahead = arguments.look_ahead;
  options.speculate = arguments.speculate;
  options.chunk = arguments.chunk;
  options.time_ops = arguments.roofline;
  return options;
}

moeflux::SessionOptions session_options(const Arguments& arguments, const moeflux::Variant& variant) {
  const int64_t steps = arguments.decode ? arguments.decode + 1 : 0;
  moeflux::SessionOptions options;
  options.max_context = arguments.frontiers.back() + steps;
  options.kv_dtype = arguments.kv;
  if (options.max_context > variant.max_context)
    throw ArgumentError(moeflux::concat("--prefill: expected contexts that leave room for ", steps, " steps below ",
                                        variant.max_context, ", the model's, found ", arguments.frontiers.back()));
  return options;
}

std::vector<int32_t> prompt_of(int64_t tokens, int64_t vocab, int64_t session) {
  std::vector<int32_t> prompt;
  uint64_t random = 1 + static_cast<uint64_t>(session);
  for (int64_t i = 0; i < tokens; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    prompt.push_back(static_cast<int32_t>((random >> 33) % static_cast<uint64_t>(vocab)));
  }
  return prompt;
}

}  // namespace bench
