#include "engine/blocks/routed_experts.h"

#include <algorithm>

#include "engine/experts/expert_side.h"

namespace moeflux {

RoutedExpertsBlock::RoutedExpertsBlock(const RoutedExperts& shape, const Stream& stream, int64_t layer)
    : shape_(shape),
      stream_(stream),
      layer_(layer),
      router_(shape, stream),
      shared_(shape.shared ? shape.shared->intermediate : 0, shape.geglu) {}

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
  sizes.pair_width = std::max({sizes.pair_width, stream_.width, shape_.intermediate});
  // There is one row for each pair of a token and an expert. The hidden state counts twice: for the look-ahead, or
  // because gate and up of an expert may have groups of different sizes.
  sizes.input_rows = std::max({sizes.input_rows, 2 * rows, rows * k});
  sizes.inputs = std::max({sizes.inputs, 2 * rows * stream_.width, rows * k * shape_.intermediate});
  router_.want(sizes, rows);
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
  flavour_.geglu = shape_.geglu;
  if (shape_.framed) {
    frame_.shared_in = tensors.vector("pre_feedforward_layernorm.weight");
    frame_.shared_out = tensors.vector("post_feedforward_layernorm_1.weight");
    frame_.routed_out = tensors.vector("post_feedforward_layernorm_2.weight");
    frame_.out = tensors.vector("post_feedforward_layernorm.weight");
    frame_.scale = tensors.number("layer_scalar");
  }
  if (!shape_.shared) return;
  if (shape_.shared->gated) shared_gate_ = tensors.matrix("mlp.shared_expert_gate");
  shared_.load(tensors, shape_.shared_name());
}

void RoutedExpertsBlock::run(Recorder& recorder, ExpertSide& experts, Scratch& scratch, int64_t n,
                             StepStats& stats) const {
  experts.run(recorder, *this, scratch, n, stats);
}

std::optional<Product> RoutedExpertsBlock::shared_gate(const Scratch& s) const {
  if (shared_gate_.rows == 0) return std::nullopt;
  return project(s.normed, shared_gate_, room_.shared_gate);
}

void RoutedExpertsBlock::record_route(Commands& commands, const Scratch& s, int64_t n, int64_t guess_rows) const {
  router_.record(commands, s, shared_gate(s), n, next_ ? &next_->router_ : nullptr, guess_rows);
}

void RoutedExpertsBlock::record_route_apart(Commands& commands, const Scratch& s, int64_t n, int64_t guess_rows) const {
  router_.record_apart(commands, s, shared_gate(s), n, next_ ? &next_->router_ : nullptr, guess_rows);
}

void RoutedExpertsBlock::record_picks(Commands& commands, int64_t n, int64_t guess_rows) const {
  router_.ids().download(commands, n * shape_.per_token * 4);
  if (guess_rows) next_->router_.guessed_ids().download(commands, guess_rows * shape_.per_token * 4);
}

void RoutedExpertsBlock::record_shared(Commands& commands, const Scratch& s, int64_t n) const {
  record_shared_inner(commands, s, n);
  record_shared_down(commands, n);
}

void RoutedExpertsBlock::record_shared_inner(Commands& commands, const Scratch& s, int64_t n) const {
  if (!shape_.shared) return;
  if (shape_.framed) commands.rms_norm(s.hidden, frame_.shared_in, s.out, n, stream_.width, stream_.eps);
  shared_.record_inner(commands, shape_.framed ? s.out : s.normed, n);
}

void RoutedExpertsBlock::record_shared_down(Commands& commands, int64_t n) const {
  if (!shape_.shared) return;
  shared_.record_down(commands, room_.shared, n);
  if (shape_.framed) commands.rms_norm(room_.shared, frame_.shared_out, room_.shared, n, stream_.width, stream_.eps);
}

void RoutedExpertsBlock::record_experts(Commands& commands, const Scratch& s, int64_t n, const ExpertLayout& layout,
                                        std::span<const ExpertJob> jobs) const {
  commands.expert_ffn({s.normed, n, layout.hidden, layout.intermediate, shape_.per_token, jobs, room_.expert_scratch,
                       room_.expert_out, flavour_, layer_});
}

void RoutedExpertsBlock::record_chosen(Commands& commands, const Scratch& s, int64_t n, const ExpertLayout& layout,
                                       View slots, const ExpertMatrices& first) const {
  ChosenExpertArgs args = {.x = s.normed,
                           .hidden = layout.hidden,
                           .intermediate = layout.intermediate,
                           .k = shape_.per_token,
                           .ids = router_.ids().device,
                           .experts = shape_.count,
                           .slots = slots,
                           .first = first,
                           .scratch = room_.expert_scratch,
                           .out = room_.expert_out,
                           .flavour = flavour_,
                           .alignment = layout.bytes,
                           .layer = layer_};
  if (router_.has_softmax()) args.choice = router_.choice();
  commands.chosen_expert_ffn(args, n);
}

void RoutedExpertsBlock::record_output(Commands& commands, int64_t pair, View from) const {
  commands.copy(from, room_.expert_out.at(pair * stream_.width), stream_.width * int64_t{sizeof(float)});
}

void RoutedExpertsBlock::record_sum(Commands& commands, const Scratch& s, int64_t n) const {
  if (shape_.framed) return record_framed_sum(commands, s, n);
  const bool gated = router_.input().is_gated();
  commands.combine({gated ? View{} : s.hidden, room_.expert_out, router_.weights(), stream_.width, shape_.per_token,
                    room_.shared, shared_gate_.rows ? room_.shared_gate : View{}, gated ? s.out : s.hidden},
                   n);
  if (gated) router_.input().add(commands, s, s.out, n);
}

void RoutedExpertsBlock::record_framed_sum(Commands& commands, const Scratch& s, int64_t n) const {
  const int64_t width = stream_.width;
  commands.combine({{}, room_.expert_out, router_.weights(), width, shape_.per_token, {}, {}, s.out}, n);
  commands.rms_norm(s.out, frame_.routed_out, s.out, n, width, stream_.eps);
  commands.residual_add(s.out, room_.shared, s.out, n * width);
  commands.rms_norm(s.out, frame_.out, s.out, n, width, stream_.eps);
  commands.residual_add(s.hidden, s.out, s.hidden, n * width);
  commands.scale(s.hidden, frame_.scale, n * width);
}

}  // namespace moeflux
