#include "decoder/choosing.h"

#include <optional>

namespace moeflux {

namespace {

// By what a device has found, if that is all there is to know.
std::optional<int32_t> choose_without_logits(Sampler& sampler, const Session& session) {
  if (sampler.is_greedy()) return session.likeliest(sampler.vocab_size());
  std::optional<int32_t> token;
  const double factor = sampler.shortlist_factor();
  if (factor > 0)
    session.read_shortlist(sampler.vocab_size(), factor, [&](const Shortlist& list) {
      token = sampler.choose(list);
      return token.has_value();
    });
  return token;
}

}  // namespace

int32_t choose_token(Sampler& sampler, const Session& session, std::span<const uint32_t> allowed,
                     LogProbabilities* log_probabilities) {
  if (!log_probabilities && allowed.empty())
    if (const std::optional<int32_t> token = choose_without_logits(sampler, session)) return *token;
  int32_t token = 0;
  session.read_logits(
      [&](std::span<const float> logits) { token = sampler.choose(logits, allowed, log_probabilities); });
  return token;
}

}  // namespace moeflux
