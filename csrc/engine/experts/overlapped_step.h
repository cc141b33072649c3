#pragma once

#include "engine/experts/feed.h"
#include "engine/experts/picks.h"

namespace moeflux {

// One token through a layer's experts, on a device that runs ahead of the host: one submission a layer. The host waits
// for the router's choice only, while the shared expert computes. Experts on their way are recorded at once, behind a
// hold, and behind them whatever comes next, up to the next layer's choice: the device goes on by itself when they have
// arrived.
void run_overlapped_step(const ExpertCall& call, Picks& picks, ExpertFeed& feed, int64_t slots);

}  // namespace moeflux
