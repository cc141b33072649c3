// What the layers of one session remember: rows that grow with the session, and state of a fixed size. The rows of all
// layers at the same positions lie in one block of a pool, so that a session has one table of blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/row_pool.h"
#include "models/variant.h"
#include "moeflux.h"

namespace moeflux {

// A piece and where it lies.
struct PlacedPiece {
  StatePiece piece;
  Cache rows;  // of the session's type
  View fixed;  // or f32 of one size
};

// Of one layer, in the order in which its shape lists them.
using LayerState = std::vector<PlacedPiece>;

// Where each layer's pieces lie, before there is memory.
struct StateLayout {
  std::vector<LayerState> layers;  // without blocks, and views of no buffer
  int64_t block_bytes = 0;         // of the rows of block_rows positions
  int64_t recurrent_bytes = 0;

  // What the host reads and writes the state through, where the device has memory of its own.
  int64_t exchange_bytes() const;
};

StateLayout state_layout(const Variant& variant, DType kv_dtype);

// That so many positions take.
constexpr int64_t blocks_of(int64_t positions) { return (positions + block_rows - 1) / block_rows; }

class SessionState {
 public:
  // Blocks are taken from the pool, which is for this type.
  SessionState(const Variant& variant, int64_t max_context, DType kv_dtype, Backend& backend, RowPool& pool);

  const LayerState& layer(size_t index) const { return layers_[index]; }
  bool has_recurrent() const { return recurrent_bytes_ > 0; }

  // The fixed-size part, of all layers together: a copy kept or brought back. No batch under way uses it.
  int64_t recurrent_bytes() const { return recurrent_bytes_; }
  const Buffer& recurrent() const { return *recurrent_; }
  void save_recurrent(const Buffer& to) const;
  void load_recurrent(const Buffer& from) const;
  void clear_recurrent() const;
  // The state and a copy change places.
  void swap_recurrent(std::unique_ptr<Buffer>& copy) noexcept;

  // Makes room for the rows `begin` ... `end` - 1 in blocks that no other session has. Those before `begin` stay as
  // they are. BudgetError and the like leave everything as it was.
  void make_room(int64_t begin, int64_t end, const char* asker);
  // Becomes what another of the same type was at a position, from nothing. Full blocks are shared. `recurrent` is the
  // fixed-size part there; none at position 0.
  void become(const SessionState& other, int64_t position, const Buffer* recurrent);
  // Gives back the blocks behind those of so many positions.
  void keep_rows(int64_t count) noexcept;

  // Everything, in layer order, with rows for `position` tokens.
  std::vector<StateTensor> tensors(int64_t position) const;

 private:
  // Some of a tensor's bytes, and where they are: so far behind what `base` is when they are read or written.
  struct Part {
    const View* base;
    int64_t offset;
    size_t bytes;
  };
  StateTensor tensor(size_t layer, std::string name, DType dtype, std::vector<int64_t> shape,
                     std::vector<Part> parts) const;
  void place_recurrent() noexcept;
  template <typename Visit>
  static void each_part(const std::vector<Part>& parts, int64_t begin, size_t size, const Visit& visit);
  void add_parts(std::vector<Part>& parts, int64_t rows, int64_t in_block, int64_t offset, int64_t row_bytes) const;
  void read(View from, std::span<std::byte> to) const;
  void write(std::span<const std::byte> from, View to) const;

  Backend& backend_;
  RowPool& pool_;
  std::vector<LayerState> layers_;
  std::vector<View> table_;             // [blocks of max_context]: those of `blocks_`, which layers and ops see
  std::vector<RowPool::Block> blocks_;  // as many as rows need
  std::unique_ptr<Buffer> recurrent_;
  std::unique_ptr<Buffer> exchange_;  // for the host to read and write through, where it does not reach the others
  mutable std::mutex exchanging_;     // guards its content
  int64_t recurrent_bytes_ = 0;
};

}  // namespace moeflux
