#include "next_token.h"

#include <chrono>

namespace bench {

NextToken::NextToken(const Arguments& arguments, int64_t vocab_size, int64_t session) {
  if (!arguments.sampling) return;
  moeflux::Sampling sampling = *arguments.sampling;
  sampling.seed += static_cast<uint64_t>(session);
  sampler_ = std::make_unique<moeflux::Sampler>(sampling, vocab_size, std::span<const int32_t>(), arguments.isa);
}

int32_t NextToken::after(const moeflux::Session& session) {
  const auto start = std::chrono::steady_clock::now();
  const int32_t token = choose(session);
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return token;
}

int32_t NextToken::choose(const moeflux::Session& session) {
  if (!sampler_) return session.argmax();
  int32_t token = 0;
  session.read_logits([&](std::span<const float> logits) { token = sampler_->choose(logits); });
  return token;
}

}  // namespace bench
