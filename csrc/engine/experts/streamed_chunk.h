#pragma once

#include "engine/experts/feed.h"
#include "engine/experts/picks.h"

namespace moeflux {

// Any number of tokens through a layer's experts. The shared expert and the experts in slots are computed while the
// others are read. Each of these is computed as it arrives. If there are fewer slots than experts needed, the experts
// that have arrived are submitted a few at a time. Slots whose experts are done are filled again while the next ones
// compute.
void run_streamed_chunk(const ExpertCall& call, Picks& picks, ExpertFeed& feed);

}  // namespace moeflux
