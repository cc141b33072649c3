#include "engine/next_step.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moeflux {

NextStep::Part NextStep::part_of(const Piece& piece) {
  return {piece.state->placing(), piece.position, bool(piece.found), bool(piece.lists), piece.factor};
}

void NextStep::become(std::span<const Piece> pieces, Batches batches, const StepStats& counts) {
  forget();
  parts_.clear();
  std::ranges::transform(pieces, std::back_inserter(parts_), &part_of);
  counts_ = counts;
  batches_ = std::move(batches);
  ++recorded_;
}

bool NextStep::is(std::span<const Piece> pieces) const {
  const auto is_part = [](const Part& part, const Piece& piece) { return is_plain(piece) && part == part_of(piece); };
  return !batches_.empty() && std::ranges::equal(parts_, pieces, is_part);
}

NextStep::Batches NextStep::take(StepStats& stats) {
  ++taken_;
  stats += counts_;
  return std::exchange(batches_, {});
}

void NextStep::forget() noexcept { batches_.clear(); }

}  // namespace moeflux
