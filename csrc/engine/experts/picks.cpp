#include "engine/experts/picks.h"

namespace moeflux {

std::span<const ExpertGroups::Group> Picks::await(const ExpertCall& call, ExpertFeed& feed, bool runs_on) {
  Ticket ticket = call.recorder.submit();
  const double waited = call.stats.read_wait_seconds;
  feed.let_go(call.recorder, call.stats);
  if (runs_on) {
    ++call.stats.waits;
    ticket.reach();
    call.recorder.defer(std::move(ticket));
  } else {
    call.recorder.await(std::move(ticket));
  }
  call.stats.router_seconds += call.laps.lap() - (call.stats.read_wait_seconds - waited);

  const auto pairs = static_cast<size_t>(call.n * call.block.per_token());
  const std::span<const int32_t> ids(call.block.router().ids().values<int32_t>(), pairs);
  if (observer_) observer_(call.layer(), ids);
  groups_.assign(ids);
  return groups_.groups();
}

}  // namespace moeflux
