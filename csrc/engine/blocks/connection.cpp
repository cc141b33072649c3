#include "engine/blocks/connection.h"

#include <algorithm>
#include <array>

namespace moeflux {

void Connection::place(ScratchLayout& layout) {
  if (!is_gated()) return;
  const int64_t n = layout.rows();
  layout.place(room_.normed, "streams normed", n * stream_.count * stream_.width);
  layout.place(room_.low, "streams low", n * stream_.rank);
  layout.place(room_.gates, "streams gates", n * stream_.count * stream_.width);
  layout.place(room_.yields, "streams yields", n * stream_.count);
}

void Connection::want(WorkSizes& sizes, int64_t rows) const {
  if (!is_gated()) return;
  sizes.inputs = std::max(sizes.inputs, rows * std::max(stream_.count * stream_.width, stream_.rank));
  sizes.has_streams = true;
}

void Connection::load(const LayerTensors& tensors, const std::string& norm, const std::string& gated) {
  if (!is_gated()) {
    norm_ = tensors.vector(norm);
    return;
  }
  norm_ = tensors.vector(gated + ".hc_norm.weight");
  down_ = tensors.matrix(gated + ".input_mix_weight_down");
  up_ = tensors.matrix(gated + ".input_mix_weight_up");
  if (tensors.has_matrix(gated + ".block_inject_weight")) yields_ = tensors.matrix(gated + ".block_inject_weight");
}

void Connection::read(Commands& commands, const Scratch& s, int64_t n) const {
  if (!is_gated()) return commands.rms_norm(s.hidden, norm_, s.normed, n, stream_.width, stream_.eps);
  commands.hyper_norm(s.hidden, norm_, room_.normed, n, stream_.count, stream_.width, stream_.eps);
  std::array products = {project(room_.normed, down_, room_.low), Product{}};
  if (yields_.rows) products[1] = project(room_.normed, yields_, room_.yields);
  commands.matmul({products.data(), yields_.rows ? size_t{2} : size_t{1}}, n);
  commands.silu(room_.low, 1 / static_cast<float>(stream_.count), n * stream_.rank);
  commands.matmul(std::array{project(room_.low, up_, room_.gates)}, n);
  commands.hyper_mix({room_.normed, room_.gates, stream_.count, stream_.width, s.normed}, n);
}

void Connection::add(Commands& commands, const Scratch& s, View y, int64_t n) const {
  if (!is_gated()) return commands.residual_add(s.hidden, y, s.hidden, n * stream_.width);
  commands.hyper_add({s.hidden, y, room_.yields, stream_.count, stream_.width}, n);
}

}  // namespace moeflux
