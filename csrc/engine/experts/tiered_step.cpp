#include "engine/experts/tiered_step.h"

namespace moeflux {

void run_tiered_step(const ExpertCall& call, Picks& picks, ExpertFeed& feed, int64_t slots) {
  call.block.record_route_apart(call.commands(), call.scratch, call.n, call.guess_rows);
  call.block.record_shared_inner(call.commands(), call.scratch, call.n);
  call.block.record_picks(call.commands(), call.n, call.guess_rows);
  feed.record_x(call);

  // The batch must not hold leases on slots that this layer needs.
  const bool runs_on = slots >= 2 * call.block.per_token();
  feed.begin(call, picks.await(call, feed, runs_on));
  feed.ask_for_all(call);
  feed.record_places(call);  // first: a copy ends what the device may run as one
  call.block.record_shared_down(call.commands(), call.n);
  feed.record_chosen(call);
  feed.record_from_cpu(call);
  call.block.record_sum(call.commands(), call.scratch, call.n);
  call.stats.beside_seconds += call.laps.lap();
}

}  // namespace moeflux
