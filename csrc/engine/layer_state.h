// What the layers of one session remember: rows that grow with it, and state of one size.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "models/variant.h"
#include "moeflux.h"

namespace moeflux {

// A piece and where it lies: rows of the session's type, or f32 of one size.
struct PlacedPiece {
  StatePiece piece;
  Cache cache;
};

// Of one layer, in the order in which its shape lists them.
using LayerState = std::vector<PlacedPiece>;

// Where each layer's pieces lie, before there is memory.
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

  const LayerState& layer(size_t index) const { return layers_[index]; }
  bool has_recurrent() const { return recurrent_bytes_ > 0; }

  // The fixed-size part, of all layers together.
  std::span<std::byte> recurrent() const;
  void clear_recurrent() const;

  // Everything, in layer order, with rows for `position` tokens.
  std::vector<StateTensor> tensors(int64_t position) const;

 private:
  std::vector<LayerState> layers_;
  std::unique_ptr<Buffer> rows_;
  std::unique_ptr<Buffer> recurrent_;
  int64_t recurrent_bytes_ = 0;
};

}  // namespace moeflux
