// What the layers of one session remember: rows that grow with the session, and state of a fixed size. The rows of
// layers that see equally far lie together: those of the same positions in one block of a pool, and a session has a
// table of these blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/row_table.h"
#include "models/variant.h"
#include "moeflux.h"

namespace moeflux {

// A piece and where it lies.
struct PlacedPiece {
  StatePiece piece;
  Cache rows;         // of the session's type
  size_t kind = 0;    // of these rows
  View fixed;         // or f32 of one size
  int64_t bytes = 0;  // of that, with what a device keeps behind it

  bool has_room() const { return piece.is_delta && bytes > piece.width() * 4; }
};

// Of one layer, in the order in which its shape lists them.
using LayerState = std::vector<PlacedPiece>;

// Where each layer's pieces lie, before there is memory.
struct StateLayout {
  std::vector<LayerState> layers;  // without blocks, and views of no buffer
  std::vector<RowKind> kinds;
  int64_t recurrent_bytes = 0;

  // What a session's rows take at most, in passes of at most `chunk` rows.
  int64_t rows_bytes(const SessionOptions& session, int64_t chunk) const;

  // What the host reads and writes the state through, where the device has memory of its own.
  int64_t exchange_bytes() const;
};

// Where all of a session's state lies: equal only for the same session, and while nothing of it lies elsewhere.
struct Placing {
  int64_t session;
  int64_t changes;

  bool operator==(const Placing&) const = default;
};

// `room`: of the device.
StateLayout state_layout(const Variant& variant, DType kv_dtype, DeltaRoom room);

class SessionState {
 public:
  // Blocks are taken from the pools, which are for the kinds of rows of this type. `beside`: bytes of the session's
  // rows that others keep.
  SessionState(const Variant& variant, const SessionOptions& options, int64_t chunk, Backend& backend, RowPools& pools,
               int64_t beside);

  const LayerState& layer(size_t index) const { return layers_[index]; }
  Placing placing() const noexcept;
  // Whether a row that comes next may be written where it belongs, without more memory.
  bool has_room(int64_t row) const;
  bool has_recurrent() const { return recurrent_bytes_ > 0; }

  // The fixed-size part, of all layers together: a copy kept or brought back. No batch under way uses it.
  int64_t recurrent_bytes() const { return recurrent_bytes_; }
  const Buffer& recurrent() const { return *recurrent_; }
  void save_recurrent(const Buffer& to) const;
  void load_recurrent(const Buffer& from) const;
  void clear_recurrent() const;
  // Before the host reads the state: takes the tokens into it that the device keeps behind it.
  void complete_recurrent() const;
  // Before the host writes the state: there are no such tokens any more.
  void forget_pending() const;
  // The state and a copy change places.
  void swap_recurrent(std::unique_ptr<Buffer>& copy) noexcept;

  // Makes room for the rows `begin` ... `end` - 1 of a call. Those before `begin` stay as they are. BudgetError and the
  // like leave everything as it was.
  void make_room(int64_t begin, int64_t end, const char* asker);
  // Before a pass of the call that writes these rows, in blocks that no other session has.
  void enter(int64_t begin, int64_t end, const Places& places) noexcept;
  // Gives back the rows that neither a session at this position needs nor other places do, and, at the end of a call,
  // the room that it has not used.
  void forget_rows(int64_t position, const Places& places) noexcept;
  void end_call(int64_t position, const Places& places) noexcept;
  // From there on, every place up to `position` has the rows that it needs.
  int64_t exact_from(int64_t position) const;
  // Becomes what another of the same type was at a position, from nothing. Full blocks are shared. `recurrent` is the
  // fixed-size part there; none at position 0.
  void become(const SessionState& other, int64_t position, const Buffer* recurrent);
  // Makes room for what a session at a position needs, in place of what there is. BudgetError and the like leave
  // everything as it was.
  void renew(int64_t position, const char* asker);

  // Everything that a session at a position needs, in layer order.
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
  static std::vector<Part> row_parts(std::span<const View> blocks, int64_t first, int64_t end, int64_t in_block,
                                     int64_t offset, int64_t row_bytes);
  template <typename Lacking, typename Use>
  void take(const char* asker, const Lacking& lacking, const Use& use);
  void read(View from, std::span<std::byte> to) const;
  void write(std::span<const std::byte> from, View to) const;

  Backend& backend_;
  RowPools& pools_;
  int64_t layers_before_;  // of the model
  std::vector<LayerState> layers_;
  std::vector<RowTable> tables_;      // one for each kind
  std::vector<PlannedRows> planned_;  // likewise
  std::unique_ptr<Buffer> recurrent_;
  std::unique_ptr<Buffer> exchange_;  // for the host to read and write through, where it does not reach the others
  mutable std::mutex exchanging_;     // guards its content
  int64_t recurrent_bytes_ = 0;
  int64_t number_;     // of all sessions of the process
  int64_t swaps_ = 0;  // of the recurrent state with a copy
};

}  // namespace moeflux
