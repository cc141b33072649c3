// The ops of a layer with experts. ExpertSide decides where the experts lie and when they are computed.
#pragma once

#include <optional>
#include <span>

#include "engine/blocks/gated_mlp.h"
#include "engine/blocks/router.h"
#include "format/expert_layout.h"
#include "models/routed_experts.h"

namespace moeflux {

class RoutedExpertsBlock final : public FeedForwardBlock {
 public:
  RoutedExpertsBlock(const RoutedExperts& shape, const Stream& stream, int64_t layer);

  void place(ScratchLayout& layout) override;
  void want(WorkSizes& sizes, int64_t rows) const override;
  void load(const LayerTensors& tensors) override;
  void run(Recorder& recorder, ExpertSide& experts, Scratch& scratch, int64_t n, StepStats& stats) const override;

  // The experts of the next layer, whose router may make a guess for the look-ahead.
  void set_next(const RoutedExpertsBlock* next) { next_ = next; }
  const RoutedExpertsBlock* next() const { return next_; }

  int64_t layer() const { return layer_; }
  int64_t per_token() const { return shape_.per_token; }
  const ExpertRouter& router() const { return router_; }
  const ExpertFlavour& flavour() const { return flavour_; }

  // Records the choice of experts for n tokens. With `guess_rows`, also a guess which experts of the next layer the
  // first of these tokens will go through.
  void record_route(Commands& commands, const Scratch& scratch, int64_t n, int64_t guess_rows) const;
  // The same with the ops of either choice side by side, see ExpertRouter.
  void record_route_apart(Commands& commands, const Scratch& scratch, int64_t n, int64_t guess_rows) const;
  // Records copies of both choices to the host, if it does not see them anyway.
  void record_picks(Commands& commands, int64_t n, int64_t guess_rows) const;
  // Records the shared expert, if there is one.
  void record_shared(Commands& commands, const Scratch& scratch, int64_t n) const;
  // The same in two parts, between which the other experts may be chosen.
  void record_shared_inner(Commands& commands, const Scratch& scratch, int64_t n) const;
  void record_shared_down(Commands& commands, int64_t n) const;
  // Records some of the picked experts. Each pair of a token and an expert has a row of its own.
  void record_experts(Commands& commands, const Scratch& scratch, int64_t n, const ExpertLayout& layout,
                      std::span<const ExpertJob> jobs) const;
  // Records all experts that the router picked. The device finds them in a table of slots.
  void record_chosen(Commands& commands, const Scratch& scratch, int64_t n, const ExpertLayout& layout, View slots,
                     const ExpertMatrices& first) const;
  // Records that the output of a pair comes from elsewhere.
  void record_output(Commands& commands, int64_t pair, View from) const;
  // Records hidden += the outputs of the experts, in router order, and of the shared expert.
  void record_sum(Commands& commands, const Scratch& scratch, int64_t n) const;

 private:
  std::optional<Product> shared_gate(const Scratch& scratch) const;
  void record_framed_sum(Commands& commands, const Scratch& scratch, int64_t n) const;

  // Norms of a framed one: of what the shared expert reads, of what it yields, of what the experts yield, of the sum.
  struct Frame {
    View shared_in;  // [hidden], like the others
    View shared_out;
    View routed_out;
    View out;
    float scale = 1;  // of the stream at last
  };
  struct Room {
    View expert_scratch;  // [n * k, 2 * intermediate]
    View expert_out;      // [n * k, hidden]
    View shared;          // [n, hidden]
    View shared_gate;     // [n]
  };

  RoutedExperts shape_;
  Stream stream_;
  int64_t layer_;
  const RoutedExpertsBlock* next_ = nullptr;
  ExpertRouter router_;
  GatedMlp shared_;
  Matrix shared_gate_;  // [1, hidden]; empty unless the shared expert is gated
  ExpertFlavour flavour_;
  Frame frame_;
  Room room_;
};

}  // namespace moeflux
