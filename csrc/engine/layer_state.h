// What the layers of one session remember: key-value rows, latent rows, recurrent state.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "core/variant.h"
#include "moeflux.h"

namespace moeflux {

// Of one layer; what its kind does not have is empty.
struct LayerState {
  Cache k;  // rows [kv_heads * dim]
  Cache v;
  Cache latent;    // rows [rank]
  Cache rope_k;    // rows [rope]
  View conv;       // [taps - 1, conv_channels]
  View recurrent;  // [value heads, value dim, key dim]
};

// Where each layer's part lies, before there is memory.
struct StateLayout {
  std::vector<LayerState> layers;  // views of no buffer
  int64_t row_bytes = 0;
  int64_t recurrent_bytes = 0;
};

StateLayout state_layout(const Variant& variant, int64_t max_context, DType kv_dtype);

class SessionState {
 public:
  // Rows for `max_context` tokens; the system gives memory to those that are used.
  SessionState(const Variant& variant, int64_t max_context, DType kv_dtype, Backend& backend);

  const LayerState& layer(int64_t index) const { return layers_[static_cast<size_t>(index)]; }
  bool has_recurrent() const { return recurrent_bytes_ > 0; }

  // The fixed-size part, of all linear layers together.
  std::span<std::byte> recurrent() const;
  void clear_recurrent() const;

  // Everything, in layer order, with rows for `position` tokens.
  std::vector<StateTensor> tensors(int64_t position) const;

 private:
  const Variant& variant_;  // of the engine, which sessions keep alive
  std::vector<LayerState> layers_;
  std::unique_ptr<Buffer> rows_;
  std::unique_ptr<Buffer> recurrent_;
  int64_t recurrent_bytes_ = 0;
};

}  // namespace moeflux
