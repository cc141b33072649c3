// What the layers of one session remember: rows that grow with the session, and state of a fixed size.
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

  // What the host reads and writes the state through, where the device has memory of its own.
  int64_t exchange_bytes() const;
};

StateLayout state_layout(const Variant& variant, int64_t max_context, DType kv_dtype);

class SessionState {
 public:
  // Rows for `max_context` tokens; the system gives memory to those that are used.
  SessionState(const Variant& variant, int64_t max_context, DType kv_dtype, Backend& backend);

  const LayerState& layer(size_t index) const { return layers_[index]; }
  bool has_recurrent() const { return recurrent_bytes_ > 0; }

  // The fixed-size part, of all layers together: a copy kept or brought back. No batch under way uses it.
  int64_t recurrent_bytes() const { return recurrent_bytes_; }
  void save_recurrent(const Buffer& to) const;
  void load_recurrent(const Buffer& from) const;
  void clear_recurrent() const;

  // Everything, in layer order, with rows for `position` tokens.
  std::vector<StateTensor> tensors(int64_t position) const;

 private:
  void read(View from, std::span<std::byte> to) const;
  void write(std::span<const std::byte> from, View to) const;

  Backend& backend_;
  std::vector<LayerState> layers_;
  std::unique_ptr<Buffer> rows_;
  std::unique_ptr<Buffer> recurrent_;
  std::unique_ptr<Buffer> exchange_;  // for the host to read and write through, where it does not reach the others
  int64_t recurrent_bytes_ = 0;
};

}  // namespace moeflux
