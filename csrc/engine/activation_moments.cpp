#include "engine/activation_moments.h"

#include <algorithm>

namespace moeflux {
namespace {

// x: n rows, `stride` numbers apart.
void add(const float* x, int64_t stride, int64_t n, int64_t columns, double* squares) {
  for (int64_t row = 0; row < n; ++row)
    for (int64_t j = 0; j < columns; ++j) {
      const double value = x[row * stride + j];
      squares[j] += value * value;
    }
}

void add(const float* x, int64_t stride, int64_t n, int64_t columns, ActivationMoments::Sums& sums) {
  sums.squares.resize(static_cast<size_t>(columns));
  sums.rows += n;
  add(x, stride, n, columns, sums.squares.data());
}

}  // namespace

ActivationMoments::ActivationMoments(const Variant& variant) : expert_count_(variant.experts().count) {}

void ActivationMoments::place(const StoreDirectory& store, const DenseWeights& weights, bool has_draft) {
  StoreDirectory loaded = store;
  if (!has_draft) leave_draft_out(loaded);
  const DenseLayout layout = dense_layout(loaded, !weights.maps.empty());
  placed_.clear();
  for (const auto& [name, format] : loaded.formats) {
    const StoredTensor& weight = loaded.tensors.at(name + ".weight");
    const DenseLayout::Place& place = layout.places.at(name + ".weight");
    const Buffer& buffer = place.map < 0 ? *weights.arena : *weights.maps[static_cast<size_t>(place.map)];
    int64_t bytes = 0;
    for (const Span& span : weight.spans) bytes += span.bytes;
    const std::byte* begin = buffer.host() + place.offset;
    placed_[begin] = {begin + bytes, name};
  }
}

const ActivationMoments::Placed* ActivationMoments::at(const std::byte* address) const {
  const auto after = placed_.upper_bound(address);
  if (after == placed_.begin()) return nullptr;
  const Placed& found = std::prev(after)->second;
  return address < found.end ? &found : nullptr;
}

void ActivationMoments::saw(const Product& product, int64_t n) {
  const std::byte* address = product.matrix.weight.bytes();
  if (at(address)) add(product.x.f32(), product.x_stride, n, product.matrix.columns, dense_[address]);
}

// The matrices of a stack are added up now, in their order.
std::map<std::string, ActivationMoments::Sums> ActivationMoments::dense() const {
  std::map<std::string, Sums> named;
  for (const auto& [address, each] : dense_) {
    Sums& sums = named[at(address)->name];
    sums.rows += each.rows;
    sums.squares.resize(each.squares.size());
    for (size_t j = 0; j < each.squares.size(); ++j) sums.squares[j] += each.squares[j];
  }
  return named;
}

// A pass brings the experts of a layer in one call or in several, but each pair of a row and an expert once.
void ActivationMoments::saw(const ExpertArgs& args) {
  Experts& layer = experts_[args.layer];
  const auto width = static_cast<size_t>(args.intermediate);
  layer.rows.resize(static_cast<size_t>(expert_count_));
  layer.squares.resize(layer.rows.size() * width);
  if (layer.left_of_pass == 0) {
    add(args.x.f32(), args.hidden, args.rows, args.hidden, layer.input);
    layer.left_of_pass = args.rows * args.k;
  }
  const float* gated = args.scratch.f32();
  for (const ExpertJob& job : args.jobs) {
    const auto expert = static_cast<size_t>(job.index);
    layer.rows[expert] += job.count;
    add(gated, 2 * args.intermediate, job.count, args.intermediate, layer.squares.data() + expert * width);
    gated += job.count * 2 * args.intermediate;
    layer.left_of_pass -= job.count;
  }
}

}  // namespace moeflux
