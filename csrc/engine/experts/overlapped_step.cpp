#include "engine/experts/overlapped_step.h"

namespace moeflux {

void run_overlapped_step(const ExpertCall& call, Picks& picks, ExpertFeed& feed, int64_t slots) {
  call.block.record_route(call.commands(), call.scratch, call.n, call.guess_rows);
  call.block.record_picks(call.commands(), call.n, call.guess_rows);
  call.commands().mark();
  call.block.record_shared(call.commands(), call.scratch, call.n);

  // The batch must not hold leases on slots that this layer needs.
  const bool runs_on = slots >= 2 * call.block.per_token();
  feed.begin(call, picks.await(call, feed, runs_on));
  feed.ask_for_all(call);
  feed.record_experts(call);
  if (feed.arriving()) {
    feed.take_promised(call);
    feed.record_experts(call);
  }
  call.block.record_sum(call.commands(), call.scratch, call.n);
  call.stats.beside_seconds += call.laps.lap();
}

}  // namespace moeflux
