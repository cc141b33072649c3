// A draw from a shortlist, where that has all that the draw needs.
//
// Sums are not made in the order that choosing from all logits has. So a token is taken only where no order could give
// another one: where every comparison of sums is clear by more than they may be off.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/shortlist.h"
#include "sampling/chooser.h"
#include "sampling/sampler.h"

namespace moeflux {

class ShortChooser {
 public:
  explicit ShortChooser(const cpu::ChoiceKernels& kernels);

  // What Chooser::draw gives for the logits; nothing where the list does not tell.
  std::optional<int32_t> draw(const Shortlist& list, const Sampling& sampling, double uniform);

  int64_t bytes() const { return chooser_.bytes() + bytes_of(values_); }

 private:
  void take(std::span<const float> logits);
  std::optional<int32_t> draw_from_all(const Shortlist& list, const Sampling& sampling, double uniform);

  Chooser chooser_;
  std::vector<float> values_;  // of the list or of a block, then -inf
};

}  // namespace moeflux
