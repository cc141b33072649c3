#include "engine/blocks/router.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace moeflux {

void ExpertRouter::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  const int64_t m = std::min(n, max_guess_rows);
  input_.place(layout);
  if (shape_.framed) layout.place(read_, "router normed", n * stream_.width);
  layout.place(own_.logits, "router", n * shape_.count);
  layout.place(own_.ids, "ids", n * shape_.per_token);
  layout.place(own_.weights, "weights", n * shape_.per_token);
  layout.place(guessed_normed_, "guessed normed", m * stream_.width);
  layout.place(guessed_.logits, "guessed router", m * shape_.count);
  layout.place(guessed_.ids, "guessed ids", m * shape_.per_token);
  layout.place(guessed_.weights, "guessed weights", m * shape_.per_token);
}

void ExpertRouter::load(const LayerTensors& tensors) {
  input_.load(tensors, shape_.framed ? "pre_feedforward_layernorm_2.weight" : "post_attention_layernorm.weight",
              "mlp_hyper_connection");
  if (shape_.framed) scale_ = tensors.vector("router.scale");
  matrix_ = tensors.matrix("mlp.gate");
  if (shape_.router.scoring == Scoring::noaux_tc) bias_ = tensors.vector("mlp.gate.e_score_correction_bias");
  if (shape_.router.bias) added_ = tensors.vector("mlp.gate.bias");
  if (shape_.router.factors) factors_ = tensors.vector("router.per_expert_scale");
}

void ExpertRouter::record(Commands& commands, const Scratch& s, const std::optional<Product>& beside, int64_t n,
                          const ExpertRouter* next, int64_t guess_rows) const {
  if (guess_rows == 0) next = nullptr;
  input_.read(commands, s, n);
  if (scale_) commands.rms_norm(s.hidden, scale_, read_, n, stream_.width, stream_.eps);
  const bool shares_input = input_.is_gated();
  if (next && !shares_input)
    commands.rms_norm(s.hidden, next->own_norm(), next->guessed_normed_, guess_rows, stream_.width, stream_.eps);
  std::array<Product, 3> products;
  size_t count = 0;
  products[count++] = project(scale_ ? read_ : s.normed, matrix_, own_.logits);
  if (beside) products[count++] = *beside;
  const size_t own = count;
  if (next)
    products[count++] = project(shares_input ? s.normed : next->guessed_normed_, next->matrix_, next->guessed_.logits);
  // All products go at once if they have the same number of rows.
  const size_t together = guess_rows == n ? count : own;
  commands.matmul({products.data(), together}, n);
  if (together < count) commands.matmul({&products[own], 1}, guess_rows);
  record_choice(commands, own_, n);
  if (next) next->record_choice(commands, next->guessed_, guess_rows);
}

void ExpertRouter::record_apart(Commands& commands, const Scratch& s, const std::optional<Product>& beside, int64_t n,
                                const ExpertRouter* next, int64_t guess_rows) const {
  const bool shares_input = input_.is_gated();
  const auto guess = [&] {
    if (guess_rows == 0) return;
    if (!shares_input)
      commands.rms_norm(s.hidden, next->own_norm(), next->guessed_normed_, guess_rows, stream_.width, stream_.eps);
    const Product product =
        project(shares_input ? s.normed : next->guessed_normed_, next->matrix_, next->guessed_.logits);
    commands.matmul({&product, 1}, guess_rows);
    next->record_choice(commands, next->guessed_, guess_rows);
  };
  if (!shares_input) guess();
  record(commands, s, beside, n, nullptr, 0);
  if (shares_input) guess();
}

RouteArgs ExpertRouter::choice_of(const Choice& choice) const {
  const Router& router = shape_.router;
  return {.logits = choice.logits,
          .experts = shape_.count,
          .k = shape_.per_token,
          .normalize = router.normalize,
          .scaling = static_cast<float>(router.scaling),
          .bias = bias_,
          .factors = factors_,
          .groups = router.groups,
          .groups_kept = router.groups_kept,
          .ids = choice.ids.device,
          .weights = choice.weights};
}

void ExpertRouter::record_choice(Commands& commands, const Choice& choice, int64_t n) const {
  if (scale_) commands.scale(choice.logits, 1 / std::sqrt(static_cast<float>(stream_.width)), n * shape_.count);
  if (added_) commands.bias_add(choice.logits, added_, n, shape_.count);
  const RouteArgs args = choice_of(choice);
  if (has_softmax())
    commands.route_softmax(args, n);
  else
    commands.route_grouped(args, n);
}

}  // namespace moeflux
