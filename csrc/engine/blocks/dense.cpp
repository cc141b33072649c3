#include "engine/blocks/dense.h"

#include "engine/recorder.h"

namespace moeflux {

void DenseBlock::load(const LayerTensors& tensors) {
  norm_ = tensors.vector("post_attention_layernorm.weight");
  mlp_.load(tensors, "mlp.");
}

void DenseBlock::run(Recorder& recorder, ExpertSide&, Scratch& s, int64_t n, StepStats&) const {
  Commands& commands = recorder.current();
  commands.rms_norm(s.hidden, norm_, s.normed, n, stream_.width, stream_.eps);
  mlp_.record(commands, s.normed, s.out, n);
  commands.residual_add(s.hidden, s.out, s.hidden, n * stream_.width);
}

}  // namespace moeflux
