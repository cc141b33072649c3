// Room for lists that the host writes and one command buffer reads. Pieces of it are taken in a circle, and reused when
// their command buffer is over.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "backend/backend.h"
#include "gpu/flight.h"

namespace moeflux::metal {

class ListRing {
 public:
  void reserve(Backend& backend, int64_t bytes);
  int64_t capacity() const { return buffer_ ? buffer_->bytes() : 0; }

  // Room, aligned to 16 bytes, for the command buffer that departs next. If an earlier one still reads what lies there,
  // waits for it. Empty if the next one itself does: then it must depart first.
  std::optional<View> take(int64_t bytes, gpu::Flight& flight);

 private:
  struct Piece {
    int64_t begin;
    int64_t end;
    int64_t reader;  // number of the command buffer
  };

  std::unique_ptr<Buffer> buffer_;
  std::deque<Piece> pieces_;  // the oldest first, which is the next in the circle
  int64_t next_ = 0;
};

}  // namespace moeflux::metal
