#pragma once

#include "engine/blocks/gated_mlp.h"
#include "models/dense_mlp.h"

namespace moeflux {

class DenseBlock final : public FeedForwardBlock {
 public:
  DenseBlock(const DenseMlp& shape, const Stream& stream) : stream_(stream), mlp_(shape.intermediate) {}

  void place(ScratchLayout& layout) override { mlp_.place(layout); }
  void want(WorkSizes& sizes, int64_t rows) const override { mlp_.want(sizes, rows); }
  void load(const LayerTensors& tensors) override;
  void run(Recorder& recorder, ExpertSide& experts, Scratch& scratch, int64_t n, StepStats& stats) const override;

 private:
  Stream stream_;
  View norm_;  // [hidden]
  GatedMlp mlp_;
};

}  // namespace moeflux
