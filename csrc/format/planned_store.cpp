#include "format/planned_store.h"

#include <utility>

#include "core/error.h"
#include "format/tensor_requirements.h"

namespace moeflux {
namespace {

constexpr int64_t dense_file = 0;  // with all dense tensors, one after another

void add(StoreDirectory& store, const std::string& name, DType dtype, std::vector<int64_t> shape, TensorKind kind,
         int64_t& end) {
  auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  for (const int64_t extent : shape) bytes *= extent;
  store.tensors[name] = {dtype, std::move(shape), {{dense_file, end, bytes}}, kind};
  end += bytes;
}

// The type of matrices that are not quantised.
QuantFormat dense_plain(const QuantFormat& format) {
  return format.is_quantised() ? QuantFormat::plain(DType::bf16) : format;
}

void add_dense(StoreDirectory& store, const QuantFormat& format) {
  // Latent attention is written in stacks, as conversion writes it today.
  const auto stacked = [](const std::string& name) { return name.find("kv_b_proj") == std::string::npos; };
  int64_t end = 0;
  for (const TensorRequirement& tensor : tensor_requirements(store.variant, stacked)) {
    if (is_vector(tensor.kind) || tensor.kind == TensorKind::table) {
      add(store, tensor.name, DType::bf16, tensor.shape, tensor.kind, end);
      continue;
    }
    const int64_t columns = tensor.shape.back();
    // Only experts are published in MXFP4.
    const QuantFormat own = format.is_affine() && format.fits(columns) ? format : dense_plain(format);
    store.formats[tensor.name] = own;
    std::vector<int64_t> shape = tensor.shape;
    if (!own.is_quantised()) {
      add(store, tensor.name + ".weight", own.element, shape, tensor.kind, end);
      continue;
    }
    shape.back() = own.weight_row_bytes(columns) / 4;
    add(store, tensor.name + ".weight", DType::u32, shape, tensor.kind, end);
    shape.back() = columns / own.group_size;
    for (const char* part : {".scales", ".biases"})
      add(store, tensor.name + part, own.scale_type, shape, tensor.kind, end);
  }
}

void add_experts(StoreDirectory& store, const QuantFormat& format) {
  const Variant& v = store.variant;
  store.experts = ExpertLayout(v.hidden_size, v.experts().intermediate, {format, format, format});
  store.expert_places.resize(static_cast<size_t>(v.all_layers()));
  for (int64_t layer = 0; layer < v.all_layers(); ++layer) {
    if (!v.is_moe(layer)) continue;
    const auto file = static_cast<int64_t>(store.files.size());
    store.files.push_back(concat("layer ", layer, ", not made yet"));
    for (const ExpertPiece& piece : store.experts.pieces)
      store.expert_places[static_cast<size_t>(layer)].push_back({file, piece.offset, store.experts.bytes});
  }
}

}  // namespace

StoreDirectory planned_store(Variant variant, const QuantFormat& format) {
  StoreDirectory store;
  store.variant = std::move(variant);
  store.listing = "a store that is not made yet";
  store.files = {"dense weights, not made yet"};
  add_dense(store, format);
  add_experts(store, format);
  return store;
}

}  // namespace moeflux
