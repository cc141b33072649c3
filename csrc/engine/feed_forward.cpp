#include "engine/feed_forward.h"

#include <array>

namespace moeflux {

void record_feed_forward(Commands& commands, const FeedForwardWeights& w, View x, View out, Scratch& s, int64_t n) {
  const int64_t width = w.gate.rows;
  const std::array into = {Product{x, w.gate.columns, w.gate, s.gate, width},
                           Product{x, w.up.columns, w.up, s.up, width}};
  commands.matmul(into, n);
  commands.swiglu(s.gate, s.up, s.gate, n * width);
  commands.matmul(std::array{Product{s.gate, width, w.down, out, w.down.rows}}, n);
}

namespace {

const ExpertSideWeights& weights_of(const Model& model, int64_t layer) {
  return model.weights.layers[static_cast<size_t>(layer)].experts;
}

void record_choice(Commands& commands, const Variant& v, View bias, View logits, View ids, View weights, int64_t n) {
  const RouteArgs args = {.logits = logits,
                          .experts = v.num_experts,
                          .k = v.experts_per_token,
                          .normalize = v.normalize_topk,
                          .scaling = static_cast<float>(v.routed_scaling),
                          .bias = bias,
                          .groups = v.num_groups,
                          .groups_kept = v.groups_per_token,
                          .ids = ids,
                          .weights = weights};
  if (v.router == Router::softmax)
    commands.route_softmax(args, n);
  else
    commands.route_grouped(args, n);
}

}  // namespace

void record_route(Commands& commands, const Model& model, int64_t layer, Scratch& s, int64_t n, int64_t guess_rows) {
  const Variant& v = model.variant;
  const LayerWeights& weights = model.weights.layers[static_cast<size_t>(layer)];
  const ExpertSideWeights& w = weights.experts;
  const LayerWeights* next = guess_rows > 0 ? &model.weights.layers[static_cast<size_t>(layer) + 1] : nullptr;

  commands.rms_norm(s.hidden, weights.post_norm, s.normed, n, v.hidden_size, model.eps());
  if (next) commands.rms_norm(s.hidden, next->post_norm, s.guess_normed, guess_rows, v.hidden_size, model.eps());
  std::array<Product, 3> products;
  size_t count = 0;
  products[count++] = {s.normed, v.hidden_size, w.router, s.router, v.num_experts};
  if (w.shared_gate.rows) products[count++] = {s.normed, v.hidden_size, w.shared_gate, s.shared_gate, 1};
  const size_t own = count;
  if (next) products[count++] = {s.guess_normed, v.hidden_size, next->experts.router, s.guess_router, v.num_experts};
  // All at once where they have as many rows.
  const size_t together = guess_rows == n ? count : own;
  commands.matmul({products.data(), together}, n);
  if (together < count) commands.matmul({&products[own], 1}, guess_rows);
  record_choice(commands, v, w.bias, s.router, s.ids, s.weights, n);
  if (next) record_choice(commands, v, next->experts.bias, s.guess_router, s.guess_ids, s.guess_weights, guess_rows);
}

void record_shared(Commands& commands, const Model& model, int64_t layer, Scratch& s, int64_t n) {
  if (model.variant.shared_expert == SharedExpert::none) return;
  record_feed_forward(commands, weights_of(model, layer).shared, s.normed, s.shared, s, n);
}

void record_sum(Commands& commands, const Model& model, int64_t layer, const Scratch& s, int64_t n) {
  const Variant& v = model.variant;
  const ExpertSideWeights& w = weights_of(model, layer);
  commands.combine({s.hidden, s.expert_out, s.weights, v.hidden_size, v.experts_per_token,
                    w.shared.gate.rows ? s.shared : View{}, w.shared_gate.rows ? s.shared_gate : View{}, s.hidden},
                   n);
}

ExpertMatrices expert_matrices(const ExpertStore& store, View at) {
  const ExpertLayout& layout = store.experts();
  size_t piece = 0;
  const auto next = [&] { return View{at.buffer, at.offset + store.slot().offsets[piece++]}; };
  const auto matrix = [&](const QuantFormat& format, int64_t rows, int64_t columns) {
    Matrix m = {format, rows, columns, next(), {}, {}};
    if (format.is_affine()) {
      m.scales = next();
      m.biases = next();
    }
    return m;
  };
  ExpertMatrices result;
  result.gate = matrix(layout.formats.gate, layout.intermediate, layout.hidden);
  result.up = matrix(layout.formats.up, layout.intermediate, layout.hidden);
  result.down = matrix(layout.formats.down, layout.hidden, layout.intermediate);
  return result;
}

}  // namespace moeflux
