#include "engine/experts/streamed_chunk.h"

namespace moeflux {

void run_streamed_chunk(const ExpertCall& call, Picks& picks, ExpertFeed& feed) {
  call.block.record_route(call.commands(), call.scratch, call.n, call.guess_rows);
  call.block.record_picks(call.commands(), call.n, call.guess_rows);
  feed.begin(call, picks.await(call, feed, false));
  call.block.record_shared(call.commands(), call.scratch, call.n);
  feed.record_experts(call);
  call.stats.beside_seconds += call.laps.lap();

  const double waited = call.stats.read_wait_seconds;
  while (feed.more_to_read() || feed.arriving()) {
    call.recorder.look_around();
    if (feed.wants_room()) feed.make_room(call);
    feed.take_arrived(call);
    feed.record_experts(call);
  }
  call.stats.arrived_seconds += call.laps.lap() - (call.stats.read_wait_seconds - waited);
  call.block.record_sum(call.commands(), call.scratch, call.n);
  call.recorder.defer(call.recorder.submit());
}

}  // namespace moeflux
