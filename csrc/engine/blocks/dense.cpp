#include "engine/blocks/dense.h"

#include "engine/recorder.h"

namespace moeflux {

void DenseBlock::load(const LayerTensors& tensors) {
  input_.load(tensors, "post_attention_layernorm.weight", "mlp_hyper_connection");
  mlp_.load(tensors, "mlp.");
}

void DenseBlock::run(Recorder& recorder, ExpertSide&, Scratch& s, int64_t n, StepStats&) const {
  Commands& commands = recorder.current();
  input_.read(commands, s, n);
  mlp_.record(commands, s.normed, s.out, n);
  input_.add(commands, s, s.out, n);
}

}  // namespace moeflux
