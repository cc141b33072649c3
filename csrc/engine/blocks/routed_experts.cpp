#include "engine/blocks/routed_experts.h"

#include <algorithm>

#include "engine/experts/expert_side.h"

namespace moeflux {

RoutedExpertsBlock::RoutedExpertsBlock(const RoutedExperts& shape, const Stream& stream, int64_t layer)
    : shape_(shape),
      stream_(stream),
      layer_(layer),
      router_(shape, stream),
      shared_(shape.shared ? shape.shared->intermediate : 0) {}

void RoutedExpertsBlock::place(ScratchLayout& layout) {
  const int64_t n = layout.rows();
  const int64_t pairs = n * shape_.per_token;
  router_.place(layout);
  layout.place(room_.expert_scratch, "expert_scratch", pairs * 2 * shape_.intermediate);
  layout.place(room_.expert_out, "expert_out", pairs * stream_.width);
  if (!shape_.shared) return;
  layout.place(room_.shared, "shared", n * stream_.width);
  layout.place(room_.shared_gate, "shared_gate", n);
  shared_.place(layout);
}

void RoutedExpertsBlock::want(WorkSizes& sizes, int64_t rows) const {
  const int64_t k = shape_.per_token;
  sizes.products = std::max(sizes.products, shape_.count);
  sizes.pairs = std::max(sizes.pairs, rows * k);
  // There is one row for each pair of a token and an expert. The hidden state counts twice: for the look-ahead, or
  // because gate and up of an expert may have groups of different sizes.
  sizes.input_rows = std::max({sizes.input_rows, 2 * rows, rows * k});
  sizes.inputs = std::max({sizes.inputs, 2 * rows * stream_.width, rows * k * shape_.intermediate});
  if (shape_.shared) shared_.want(sizes, rows);
}

void RoutedExpertsBlock::load(const LayerTensors& tensors) {
  router_.load(tensors);
  if (shape_.bias) {
    flavour_.gate_bias = tensors.vector("mlp.switch_mlp.gate_proj.bias");
    flavour_.up_bias = tensors.vector("mlp.switch_mlp.up_proj.bias");
    flavour_.down_bias = tensors.vector("mlp.switch_mlp.down_proj.bias");
  }
  if (shape_.clamped) {
    flavour_.alpha = static_cast<float>(shape_.clamped->alpha);
    flavour_.limit = static_cast<float>(shape_.clamped->limit);
  }
  if (!shape_.shared) return;
  if (shape_.shared->gated) shared_gate_ = tensors.matrix("mlp.shared_expert_gate");
  shared_.load(tensors, shape_.shared->gated ? "mlp.shared_expert." : "mlp.shared_experts.");
}

void RoutedExpertsBlock::run(Recorder& recorder, ExpertSide& experts, Scratch& scratch, int64_t n,
                             StepStats& stats) const {
  experts.run(recorder, *this, scratch, n, stats);
}

void RoutedExpertsBlock::record_route(Commands& commands, const Scratch& s, int64_t n, int64_t guess_rows) const {
  std::optional<Product> gate;
  if (shared_gate_.rows) gate = project(s.normed, shared_gate_, room_.shared_gate);
  router_.record(commands, s, gate, n, next_ ? &next_->router_ : nullptr, guess_rows);
}

void RoutedExpertsBlock::record_picks(Commands& commands, int64_t n, int64_t guess_rows) const {
  router_.ids().download(commands, n * shape_.per_token * 4);
  if (guess_rows) next_->router_.guessed_ids().download(commands, guess_rows * shape_.per_token * 4);
}

void RoutedExpertsBlock::record_shared(Commands& commands, const Scratch& s, int64_t n) const {
  if (shape_.shared) shared_.record(commands, s.normed, room_.shared, n);
}

void RoutedExpertsBlock::record_experts(Commands& commands, const Scratch& s, int64_t n, const ExpertLayout& layout,
                                        std::span<const ExpertJob> jobs) const {
  commands.expert_ffn({s.normed, n, layout.hidden, layout.intermediate, shape_.per_token, jobs, room_.expert_scratch,
                       room_.expert_out, flavour_});
}

void RoutedExpertsBlock::record_chosen(Commands& commands, const Scratch& s, const ExpertLayout& layout, View slots,
                                       const ExpertMatrices& first) const {
  commands.chosen_expert_ffn({s.normed, layout.hidden, layout.intermediate, shape_.per_token, router_.ids().device,
                              slots, first, room_.expert_scratch, room_.expert_out, flavour_},
                             1);
}

void RoutedExpertsBlock::record_sum(Commands& commands, const Scratch& s, int64_t n) const {
  commands.combine({s.hidden, room_.expert_out, router_.weights(), stream_.width, shape_.per_token, room_.shared,
                    shared_gate_.rows ? room_.shared_gate : View{}, s.hidden},
                   n);
}

}  // namespace moeflux
