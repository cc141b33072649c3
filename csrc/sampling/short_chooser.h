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
#include "sampling/changes.h"
#include "sampling/chooser.h"
#include "sampling/sampler.h"
#include "sampling/value_list.h"

namespace moeflux {

class ShortChooser {
 public:
  explicit ShortChooser(const cpu::ChoiceKernels& kernels);

  // Whether lists may tell, with settings like these.
  static bool takes(const Sampling& sampling, const Changes& changes, int64_t vocab_size);
  // What Chooser::draw gives for the logits, or for what becomes of them; nothing where the list does not tell.
  std::optional<int32_t> draw(const Shortlist& list, const Sampling& sampling, const Changes& changes, double uniform);

  int64_t bytes() const { return chooser_.bytes() + bytes_of(values_) + changed_.bytes() + best_.bytes(); }

 private:
  void take(std::span<const float> logits);
  std::optional<int32_t> draw_changed(const Shortlist& list, const Sampling& sampling, const Changes& changes,
                                      double uniform);
  std::optional<int32_t> draw_from_all(const Shortlist& list, const Sampling& sampling, double uniform);

  const cpu::ChoiceKernels& kernels_;
  Chooser chooser_;
  std::vector<float> values_;  // of the list or of a block, then -inf
  ValueList changed_;          // what becomes of all that are listed; their tokens are their places there
  ValueList best_;             // and the best of them
};

}  // namespace moeflux
