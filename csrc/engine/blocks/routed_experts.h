// The ops around the experts that a router picks; which of them lie where, and when they are computed, is ExpertSide's.
#pragma once

#include "engine/blocks/gated_mlp.h"
#include "models/routed_experts.h"

namespace moeflux {

// Tokens of a call whose picks of the next layer are guessed.
constexpr int64_t most_guess_rows = 64;

class RoutedExpertsBlock final : public FeedForwardBlock {
 public:
  struct Room {
    View router;          // [n, experts]
    View ids;             // i32 [n, k]
    View weights;         // [n, k]
    View expert_scratch;  // [n * k, 2 * intermediate]
    View expert_out;      // [n * k, hidden]
    View shared;          // [n, hidden]
    View shared_gate;     // [n]

    // Where the layer before guesses what this one will pick, of the first m rows, at most most_guess_rows.
    View guess_normed;   // [m, hidden]
    View guess_router;   // [m, experts]
    View guess_ids;      // i32 [m, k]
    View guess_weights;  // [m, k]
  };

  RoutedExpertsBlock(const RoutedExperts& shape, const Stream& stream, int64_t layer);

  void place(ScratchLayout& layout) override;
  void want(WorkSizes& sizes, int64_t rows) const override;
  void load(const LayerTensors& tensors) override;
  void run(std::unique_ptr<Commands>& commands, ExpertSide& experts, Scratch& scratch, int64_t n,
           StepStats& stats) const override;

  // The experts of the layer behind this one, whose router may be asked ahead.
  void set_next(const RoutedExpertsBlock* next) { next_ = next; }
  const RoutedExpertsBlock* next() const { return next_; }

  int64_t layer() const { return layer_; }
  int64_t per_token() const { return shape_.per_token; }
  const Room& room() const { return room_; }

  // Norm, router logits, choice: ids and weights of the experts of n tokens. With `guess_rows`, the same of the next
  // layer for the first of the hidden states, as they are before this layer's experts have added theirs.
  void record_route(Commands& commands, const Scratch& scratch, int64_t n, int64_t guess_rows) const;
  // The shared expert, where there is one.
  void record_shared(Commands& commands, const Scratch& scratch, int64_t n) const;
  // hidden += what the experts gave, in router order, and the shared one.
  void record_sum(Commands& commands, const Scratch& scratch, int64_t n) const;

 private:
  void record_choice(Commands& commands, View logits, View ids, View weights, int64_t n) const;

  RoutedExperts shape_;
  Stream stream_;
  int64_t layer_;
  const RoutedExpertsBlock* next_ = nullptr;
  GatedMlp shared_;

  View norm_;           // [hidden]
  Matrix router_;       // [experts, hidden]
  View bias_;           // [experts]; noaux_tc only
  Matrix shared_gate_;  // [1, hidden]; empty unless the shared expert is gated
  Room room_;
};

}  // namespace moeflux
