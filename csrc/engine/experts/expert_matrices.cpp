#include "engine/experts/expert_matrices.h"

namespace moeflux {

ExpertMatrices expert_matrices(const ExpertStore& store, int64_t layer, View at) {
  const ExpertLayout& layout = store.experts(layer);
  size_t piece = 0;
  const auto next = [&] { return View{at.buffer, at.offset + store.slot().offsets[piece++]}; };
  const auto matrix = [&](const QuantFormat& format, int64_t rows, int64_t columns) {
    Matrix m = {format, rows, columns, next(), {}, {}};
    if (format.has_scales()) m.scales = next();
    if (format.is_affine()) m.biases = next();
    return m;
  };
  ExpertMatrices result;
  result.gate = matrix(layout.formats.gate, layout.intermediate, layout.hidden);
  result.up = matrix(layout.formats.up, layout.intermediate, layout.hidden);
  result.down = matrix(layout.formats.down, layout.hidden, layout.intermediate);
  return result;
}

}  // namespace moeflux
