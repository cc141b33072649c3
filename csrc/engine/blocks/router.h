// Which experts a token goes through, and how much of each.
#pragma once

#include <optional>

#include "engine/blocks/connection.h"
#include "models/routed_experts.h"

namespace moeflux {

// For how many tokens of a call, at most, the picks in the next layer are guessed.
constexpr int64_t max_guess_rows = 64;

class ExpertRouter {
 public:
  ExpertRouter(const RoutedExperts& shape, const Stream& stream) : shape_(shape), stream_(stream), input_(stream) {}

  void place(ScratchLayout& layout);
  void want(WorkSizes& sizes, int64_t rows) const { input_.want(sizes, rows); }
  void load(const LayerTensors& tensors);

  // Records norm, logits and choice for n tokens. `beside` is one more product of the normed rows. With `guess_rows`,
  // the next layer's router does the same for so many of the hidden states, before this layer's experts have added
  // their outputs; where gates read several streams, it takes what this layer's read.
  void record(Commands& commands, const Scratch& scratch, const std::optional<Product>& beside, int64_t n,
              const ExpertRouter* next, int64_t guess_rows) const;
  // The same, but all ops of the guess come one after the other, so that those of either choice can go together.
  void record_apart(Commands& commands, const Scratch& scratch, const std::optional<Product>& beside, int64_t n,
                    const ExpertRouter* next, int64_t guess_rows) const;
  // The choice for n tokens as an op, which changes nothing when it is made again.
  RouteArgs choice() const { return choice_of(own_); }
  bool has_softmax() const { return shape_.router.scoring == Scoring::softmax; }

  // Of the router and the experts.
  const Connection& input() const { return input_; }
  const Mirrored& ids() const { return own_.ids; }              // i32 [n, k]
  View weights() const { return own_.weights; }                 // [n, k]
  const Mirrored& guessed_ids() const { return guessed_.ids; }  // i32 [m, k], if the layer before guesses

 private:
  struct Choice {
    View logits;   // [n, experts]
    Mirrored ids;  // i32 [n, k]
    View weights;  // [n, k]
  };

  View own_norm() const { return scale_ ? scale_ : input_.norm(); }
  RouteArgs choice_of(const Choice& choice) const;
  void record_choice(Commands& commands, const Choice& choice, int64_t n) const;

  RoutedExperts shape_;
  Stream stream_;
  Connection input_;  // of what the experts read, and the router, unless it has a norm of its own
  View scale_;        // [hidden]: the router's own; empty without it
  Matrix matrix_;     // [experts, hidden]
  View bias_;         // [experts]: noaux_tc's, which helps to choose
  View added_;        // [experts]: what is added to the logits; empty without it
  View factors_;      // [experts]: of the weights; empty without them
  View read_;         // [n, hidden]: what the router reads, if it has a norm of its own
  Choice own_;
  Choice guessed_;       // of at most max_guess_rows
  View guessed_normed_;  // [m, hidden]
};

}  // namespace moeflux
