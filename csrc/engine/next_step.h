// The step to come, recorded while the device computes the present one: the host takes as long for that as the device
// for some layers.
//
// It is foreseen that each of the same sessions gets one token more, and that its logits are wanted as those before.
// What was recorded depends on nothing else: on where everything lies, on the positions, but on no number. So it is
// good for a call of just that, whatever came between, as long as everything lies where it did. Any other pass has it
// forgotten, because a pass writes what a batch that is settled may still bring from the host, and so does a pass that
// fails.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "engine/piece.h"
#include "moeflux.h"

namespace moeflux {

class NextStep {
 public:
  using Batches = std::vector<std::unique_ptr<Commands>>;

  // Whether a call with this piece is one whose next may be foreseen, and that may have been foreseen.
  static bool is_plain(const Piece& piece) {
    return piece.rows() == 1 && piece.logits && piece.all_logits.empty() && piece.drafts == 0;
  }

  // Becomes that of these pieces: their positions, not their tokens. `counts` is what a call of it counts besides what
  // every call does.
  void become(std::span<const Piece> pieces, Batches batches, const StepStats& counts);
  // Whether it was recorded for these.
  bool is(std::span<const Piece> pieces) const;
  // Its batches, in order, each to be submitted. There is none any more.
  Batches take(StepStats& stats);
  void forget() noexcept;

  // How many there were, and how many of them were taken, for tests.
  int64_t recorded() const { return recorded_; }
  int64_t taken() const { return taken_; }

 private:
  // What of a piece its ops depend on.
  struct Part {
    Placing placing;
    int64_t position;
    bool is_surveyed;
    bool is_listed;
    double factor;

    bool operator==(const Part&) const = default;
  };
  static Part part_of(const Piece& piece);

  std::vector<Part> parts_;
  Batches batches_;  // none: nothing is recorded
  StepStats counts_;
  int64_t recorded_ = 0;
  int64_t taken_ = 0;
};

}  // namespace moeflux
