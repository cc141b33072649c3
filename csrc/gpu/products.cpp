#include "gpu/products.h"

#include <algorithm>

namespace moeflux::gpu {
namespace {

bool same_shape(const Product& a, const Product& b) {
  return a.matrix.format == b.matrix.format && a.matrix.rows == b.matrix.rows && a.matrix.columns == b.matrix.columns &&
         a.transposed == b.transposed && a.x_stride == b.x_stride && a.out_stride == b.out_stride &&
         a.x.buffer == b.x.buffer && a.out.buffer == b.out.buffer && a.matrix.weight.buffer == b.matrix.weight.buffer;
}

}  // namespace

Step step_between(const Product& a, const Product& b) {
  const QuantFormat& format = a.matrix.format;
  const int64_t row = format.weight_row_bytes(a.matrix.columns);
  const int64_t weight = b.matrix.weight.offset - a.matrix.weight.offset;
  const int64_t rows = weight / row;
  const int64_t scales = rows * format.scale_row_bytes(a.matrix.columns);
  const bool whole = rows * row == weight && b.matrix.scales.offset - a.matrix.scales.offset == scales &&
                     (!format.is_affine() || b.matrix.biases.offset - a.matrix.biases.offset == scales);
  return {b.x.offset - a.x.offset, b.out.offset - a.out.offset, whole ? rows : -1};
}

size_t evenly_apart(std::span<const Product> products) {
  if (products.size() < 2 || !same_shape(products[0], products[1])) return 1;
  const Step step = step_between(products[0], products[1]);
  if (step.x < 0 || step.out <= 0 || step.rows < 0) return 1;
  size_t count = 2;
  while (count < products.size() && same_shape(products[0], products[count]) &&
         step_between(products[count - 1], products[count]) == step)
    ++count;
  return count;
}

int64_t base_of(const ExpertMatrices& expert) {
  int64_t base = expert.gate.weight.offset;
  for (const Matrix* matrix : {&expert.gate, &expert.up, &expert.down})
    for (const View& view : {matrix->weight, matrix->scales, matrix->biases})
      if (view) base = std::min(base, view.offset);
  return base;
}

}  // namespace moeflux::gpu
