#include "engine/layer_state.h"

#include <cstring>
#include <utility>

#include "core/checked.h"

namespace moeflux {
namespace {

constexpr int64_t alignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

StateLayout state_layout(const Variant& variant, int64_t max_context, DType kv_dtype) {
  StateLayout layout;
  const auto place_rows = [&](Cache& cache, int64_t width) {
    cache = {{nullptr, layout.row_bytes}, kv_dtype, width};
    layout.row_bytes += aligned(max_context * width * static_cast<int64_t>(dtype_bytes(kv_dtype)));
  };
  const auto place_state = [&](View& view, int64_t bytes) {
    view = {nullptr, layout.recurrent_bytes};
    layout.recurrent_bytes += aligned(bytes);
  };
  layout.layers.resize(static_cast<size_t>(variant.num_layers()));
  for (int64_t i = 0; i < variant.num_layers(); ++i) {
    LayerState& layer = layout.layers[static_cast<size_t>(i)];
    if (!variant.is_full(i)) {
      place_state(layer.conv, variant.conv_state_bytes());
      place_state(layer.recurrent, variant.recurrent_state_bytes());
    } else if (variant.attention == Attention::mla) {
      place_rows(layer.latent, variant.kv_lora_rank);
      place_rows(layer.rope_k, variant.qk_rope_dim);
    } else {
      place_rows(layer.k, variant.kv_dim());
      place_rows(layer.v, variant.kv_dim());
    }
  }
  return layout;
}

SessionState::SessionState(const Variant& variant, int64_t max_context, DType kv_dtype, Backend& backend)
    : variant_(variant) {
  StateLayout layout = state_layout(variant, max_context, kv_dtype);
  layers_ = std::move(layout.layers);
  recurrent_bytes_ = layout.recurrent_bytes;
  rows_ = backend.allocate(layout.row_bytes, "key-value rows");
  recurrent_ = backend.allocate(recurrent_bytes_, "recurrent state");
  for (int64_t i = 0; i < variant.num_layers(); ++i) {
    LayerState& layer = layers_[static_cast<size_t>(i)];
    for (Cache* cache : {&layer.k, &layer.v, &layer.latent, &layer.rope_k})
      if (cache->width) cache->view.buffer = rows_.get();
    if (!variant.is_full(i)) layer.conv.buffer = layer.recurrent.buffer = recurrent_.get();
  }
}

std::span<std::byte> SessionState::recurrent() const {
  return {recurrent_->data(), static_cast<size_t>(recurrent_bytes_)};
}

void SessionState::clear_recurrent() const {
  if (recurrent_bytes_) std::memset(recurrent_->data(), 0, static_cast<size_t>(recurrent_bytes_));
}

std::vector<StateTensor> SessionState::tensors(int64_t position) const {
  const Variant& v = variant_;
  std::vector<StateTensor> tensors;
  const auto add = [&](std::string name, int64_t layer, DType dtype, View view, std::vector<int64_t> shape) {
    int64_t bytes = static_cast<int64_t>(dtype_bytes(dtype));
    for (const int64_t extent : shape) bytes *= extent;
    tensors.push_back({std::move(name), layer, dtype, std::move(shape), view.bytes(), bytes});
  };
  for (int64_t i = 0; i < v.num_layers(); ++i) {
    const LayerState& s = layer(i);
    if (!v.is_full(i)) {
      add("conv", i, DType::f32, s.conv, {v.conv_kernel - 1, v.conv_channels()});
      add("recurrent", i, DType::f32, s.recurrent, {v.linear_value_heads, v.linear_value_dim, v.linear_key_dim});
    } else if (v.attention == Attention::mla) {
      add("latent", i, s.latent.dtype, s.latent.view, {position, v.kv_lora_rank});
      add("rope_k", i, s.rope_k.dtype, s.rope_k.view, {position, v.qk_rope_dim});
    } else {
      add("k", i, s.k.dtype, s.k.view, {position, v.num_kv_heads, v.head_dim});
      add("v", i, s.v.dtype, s.v.view, {position, v.num_kv_heads, v.head_dim});
    }
  }
  return tensors;
}

}  // namespace moeflux
