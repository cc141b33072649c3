#pragma once

#include "engine/blocks/connection.h"
#include "engine/blocks/gated_mlp.h"
#include "models/dense_mlp.h"

namespace moeflux {

class DenseBlock final : public FeedForwardBlock {
 public:
  DenseBlock(const DenseMlp& shape, const Stream& stream) : input_(stream), mlp_(shape.intermediate) {}

  void place(ScratchLayout& layout) override {
    input_.place(layout);
    mlp_.place(layout);
  }
  void want(WorkSizes& sizes, int64_t rows) const override {
    input_.want(sizes, rows);
    mlp_.want(sizes, rows);
  }
  void load(const LayerTensors& tensors) override;
  void run(Recorder& recorder, ExpertSide& experts, Scratch& scratch, int64_t n, StepStats& stats) const override;

 private:
  Connection input_;
  GatedMlp mlp_;
};

}  // namespace moeflux
