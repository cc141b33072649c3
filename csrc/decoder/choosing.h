// Choosing a session's next token, from its logits where the engine left them.
#pragma once

#include <cstdint>
#include <span>

#include "moeflux.h"

namespace moeflux {

// What `sampler.choose` gives for the session's logits. They are not read where a device has found all that it
// takes to choose.
int32_t choose_token(Sampler& sampler, const Session& session, std::span<const uint32_t> allowed,
                     LogProbabilities* log_probabilities);

}  // namespace moeflux
