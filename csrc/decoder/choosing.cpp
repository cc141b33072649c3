#include "decoder/choosing.h"

#include <optional>

namespace moeflux {

int32_t choose_token(Sampler& sampler, const Session& session, std::span<const uint32_t> allowed,
                     LogProbabilities* log_probabilities) {
  if (!log_probabilities && allowed.empty() && sampler.is_greedy())
    if (const std::optional<int32_t> token = session.likeliest(sampler.vocab_size())) return *token;
  int32_t token = 0;
  session.read_logits(
      [&](std::span<const float> logits) { token = sampler.choose(logits, allowed, log_probabilities); });
  return token;
}

}  // namespace moeflux
