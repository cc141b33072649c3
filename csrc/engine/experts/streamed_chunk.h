#pragma once

#include "engine/experts/feed.h"
#include "engine/experts/picks.h"

namespace moeflux {

// Any number of tokens through a layer's experts. The shared expert and the experts that are in slots are computed
// while the others are read, each of these as it arrives. When the slots are fewer than the experts needed, what has
// arrived goes on its way a few experts at a time, and the slots of those that are computed are filled again while the
// next compute.
void run_streamed_chunk(const ExpertCall& call, Picks& picks, ExpertFeed& feed);

}  // namespace moeflux
