#include "engine/blocks/routed_experts.h"

#include <algorithm>
#include <array>

#include "engine/expert_side.h"

namespace moeflux {

RoutedExpertsBlock::RoutedExpertsBlock(const RoutedExperts& shape, const Stream& stream, int64_t layer)
    : shape_(shape), stream_(stream), layer_(layer), shared_(shape.shared ? shape.shared->intermediate : 0) {}

void RoutedExpertsBlock::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  const int64_t pairs = n * shape_.per_token;
  const int64_t guess_rows = std::min(n, most_guess_rows);
  Room& s = room_;
  layout.place(s.router, "router", n * shape_.experts);
  layout.place(s.ids, "ids", pairs);
  layout.place(s.weights, "weights", pairs);
  layout.place(s.expert_scratch, "expert_scratch", pairs * 2 * shape_.intermediate);
  layout.place(s.expert_out, "expert_out", pairs * stream_.width);
  layout.place(s.guess_normed, "guess_normed", guess_rows * stream_.width);
  layout.place(s.guess_router, "guess_router", guess_rows * shape_.experts);
  layout.place(s.guess_ids, "guess_ids", guess_rows * shape_.per_token);
  layout.place(s.guess_weights, "guess_weights", guess_rows * shape_.per_token);
  if (!shape_.shared) return;
  layout.place(s.shared, "shared", n * stream_.width);
  layout.place(s.shared_gate, "shared_gate", n);
  shared_.place(layout);
}

void RoutedExpertsBlock::want(WorkSizes& sizes, int64_t rows) const {
  const int64_t k = shape_.per_token;
  sizes.products = std::max(sizes.products, shape_.experts);
  sizes.pairs = std::max(sizes.pairs, rows * k);
  // A row for each pair of token and expert; the hidden state twice for the look-ahead, or for an expert's gate and up
  // in groups of different sizes.
  sizes.input_rows = std::max({sizes.input_rows, 2 * rows, rows * k});
  sizes.inputs = std::max({sizes.inputs, 2 * rows * stream_.width, rows * k * shape_.intermediate});
  if (shape_.shared) shared_.want(sizes, rows);
}

void RoutedExpertsBlock::load(const LayerTensors& tensors) {
  norm_ = tensors.vector("post_attention_layernorm.weight");
  router_ = tensors.matrix("mlp.gate");
  if (shape_.router.scoring == Scoring::noaux_tc) bias_ = tensors.vector("mlp.gate.e_score_correction_bias");
  if (!shape_.shared) return;
  if (shape_.shared->gated) shared_gate_ = tensors.matrix("mlp.shared_expert_gate");
  shared_.load(tensors, shape_.shared->gated ? "mlp.shared_expert." : "mlp.shared_experts.");
}

void RoutedExpertsBlock::run(std::unique_ptr<Commands>& commands, ExpertSide& experts, Scratch& scratch, int64_t n,
                             StepStats& stats) const {
  experts.run(commands, *this, scratch, n, stats);
}

void RoutedExpertsBlock::record_choice(Commands& commands, View logits, View ids, View weights, int64_t n) const {
  const Router& router = shape_.router;
  const RouteArgs args = {.logits = logits,
                          .experts = shape_.experts,
                          .k = shape_.per_token,
                          .normalize = router.normalize,
                          .scaling = static_cast<float>(router.scaling),
                          .bias = bias_,
                          .groups = router.groups,
                          .groups_kept = router.groups_kept,
                          .ids = ids,
                          .weights = weights};
  if (router.scoring == Scoring::softmax)
    commands.route_softmax(args, n);
  else
    commands.route_grouped(args, n);
}

void RoutedExpertsBlock::record_route(Commands& commands, const Scratch& s, int64_t n, int64_t guess_rows) const {
  const RoutedExpertsBlock* next = guess_rows > 0 ? next_ : nullptr;
  commands.rms_norm(s.hidden, norm_, s.normed, n, stream_.width, stream_.eps);
  if (next) commands.rms_norm(s.hidden, next->norm_, next->room_.guess_normed, guess_rows, stream_.width, stream_.eps);
  std::array<Product, 3> products;
  size_t count = 0;
  products[count++] = project(s.normed, router_, room_.router);
  if (shared_gate_.rows) products[count++] = project(s.normed, shared_gate_, room_.shared_gate);
  const size_t own = count;
  if (next) products[count++] = project(next->room_.guess_normed, next->router_, next->room_.guess_router);
  // All at once where they have as many rows.
  const size_t together = guess_rows == n ? count : own;
  commands.matmul({products.data(), together}, n);
  if (together < count) commands.matmul({&products[own], 1}, guess_rows);
  record_choice(commands, room_.router, room_.ids, room_.weights, n);
  if (next)
    next->record_choice(commands, next->room_.guess_router, next->room_.guess_ids, next->room_.guess_weights,
                        guess_rows);
}

void RoutedExpertsBlock::record_shared(Commands& commands, const Scratch& s, int64_t n) const {
  if (shape_.shared) shared_.record(commands, s.normed, room_.shared, n);
}

void RoutedExpertsBlock::record_sum(Commands& commands, const Scratch& s, int64_t n) const {
  commands.combine({s.hidden, room_.expert_out, room_.weights, stream_.width, shape_.per_token, room_.shared,
                    shared_gate_.rows ? room_.shared_gate : View{}, s.hidden},
                   n);
}

}  // namespace moeflux
