#pragma once

#include "engine/experts/feed.h"
#include "engine/experts/picks.h"

namespace moeflux {

// One token through a layer's experts, on a device that runs ahead of the host, with one submission per layer. The host
// waits only for the router's choice, while the shared expert computes. The step records the resident experts, a hold,
// the experts still on their way, then the sum and the next layer up to its router's choice. The device goes on by
// itself when the experts have arrived.
void run_overlapped_step(const ExpertCall& call, Picks& picks, ExpertFeed& feed, int64_t slots);

}  // namespace moeflux
