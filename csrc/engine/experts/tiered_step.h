#pragma once

#include "engine/experts/expert_call.h"
#include "engine/experts/feed.h"
#include "engine/experts/picks.h"

namespace moeflux {

// One token through a layer, on a device with memory of its own that runs ahead of the host. It submits once per layer.
// The device looks up where the picked experts lie, so that its launches are the same in every step, and the experts
// are computed when the last of them has come: what they take is little beside a copy. The CPU may compute some of
// those that are in the host's memory, at the same time.
void run_tiered_step(const ExpertCall& call, Picks& picks, ExpertFeed& feed, int64_t slots);

}  // namespace moeflux
