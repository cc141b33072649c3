#include "engine/layer_state.h"

#include <cstring>
#include <utility>

#include "core/rounding.h"

namespace moeflux {
namespace {

constexpr int64_t alignment = 64;

}  // namespace

StateLayout state_layout(const Variant& variant, int64_t max_context, DType kv_dtype) {
  StateLayout layout;
  for (const Layer& layer : variant.layers) {
    LayerState& placed = layout.layers.emplace_back();
    for (StatePiece& piece : layer.state()) {
      int64_t& end = piece.rows ? layout.row_bytes : layout.recurrent_bytes;
      const DType dtype = piece.rows ? kv_dtype : DType::f32;
      const int64_t width = piece.width();
      placed.push_back({std::move(piece), {{nullptr, end}, dtype, width}});
      end += round_up((placed.back().piece.rows ? max_context : 1) * width * static_cast<int64_t>(dtype_bytes(dtype)),
                      alignment);
    }
  }
  return layout;
}

SessionState::SessionState(const Variant& variant, int64_t max_context, DType kv_dtype, Backend& backend) {
  StateLayout layout = state_layout(variant, max_context, kv_dtype);
  layers_ = std::move(layout.layers);
  recurrent_bytes_ = layout.recurrent_bytes;
  rows_ = backend.allocate(layout.row_bytes, "key-value rows");
  recurrent_ = backend.allocate(recurrent_bytes_, "recurrent state");
  for (LayerState& layer : layers_)
    for (PlacedPiece& each : layer) each.cache.view.buffer = (each.piece.rows ? rows_ : recurrent_).get();
}

std::span<std::byte> SessionState::recurrent() const {
  return {recurrent_->data(), static_cast<size_t>(recurrent_bytes_)};
}

void SessionState::clear_recurrent() const {
  if (recurrent_bytes_) std::memset(recurrent_->data(), 0, static_cast<size_t>(recurrent_bytes_));
}

std::vector<StateTensor> SessionState::tensors(int64_t position) const {
  std::vector<StateTensor> tensors;
  for (size_t i = 0; i < layers_.size(); ++i)
    for (const auto& [piece, cache] : layers_[i]) {
      std::vector<int64_t> shape = piece.shape;
      if (piece.rows) shape.insert(shape.begin(), position);
      const int64_t bytes = (piece.rows ? position : 1) * cache.width * static_cast<int64_t>(dtype_bytes(cache.dtype));
      tensors.push_back(
          {std::string(piece.name), static_cast<int64_t>(i), cache.dtype, std::move(shape), cache.view.bytes(), bytes});
    }
  return tensors;
}

}  // namespace moeflux
