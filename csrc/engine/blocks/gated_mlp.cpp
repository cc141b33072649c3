#include "engine/blocks/gated_mlp.h"

#include <algorithm>
#include <array>

namespace moeflux {

void GatedMlp::place(ScratchLayout& layout) {
  layout.place(gate_room_, "gate", layout.rows() * intermediate_);
  layout.place(up_room_, "up", layout.rows() * intermediate_);
}

void GatedMlp::want(WorkSizes& sizes, int64_t rows) const {
  sizes.inputs = std::max(sizes.inputs, rows * intermediate_);
}

void GatedMlp::load(const LayerTensors& tensors, const std::string& name) {
  gate_ = tensors.matrix(name + "gate_proj");
  up_ = tensors.matrix(name + "up_proj");
  down_ = tensors.matrix(name + "down_proj");
}

void GatedMlp::record(Commands& commands, View x, View out, int64_t n) const {
  record_inner(commands, x, n);
  record_down(commands, out, n);
}

void GatedMlp::record_inner(Commands& commands, View x, int64_t n) const {
  commands.matmul(std::array{project(x, gate_, gate_room_), project(x, up_, up_room_)}, n);
  if (geglu_)
    commands.geglu(gate_room_, up_room_, gate_room_, n * intermediate_);
  else
    commands.swiglu(gate_room_, up_room_, gate_room_, n * intermediate_);
}

void GatedMlp::record_down(Commands& commands, View out, int64_t n) const {
  commands.matmul(std::array{project(gate_room_, down_, out)}, n);
}

}  // namespace moeflux
