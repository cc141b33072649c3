#include "metal/list_ring.h"

#include "core/error.h"

namespace moeflux::metal {

void ListRing::reserve(Backend& backend, int64_t bytes) {
  if (bytes <= capacity()) return;
  buffer_ = backend.allocate(bytes, Memory::host_visible, "lists");  // whoever reads the old one keeps it
  pieces_.clear();
  next_ = 0;
}

std::optional<View> ListRing::take(int64_t bytes, gpu::Flight& flight) {
  constexpr int64_t alignment = 16;
  bytes = (bytes + alignment - 1) / alignment * alignment;
  int64_t begin = next_ + bytes <= capacity() ? next_ : 0;
  while (!pieces_.empty() && pieces_.front().begin < begin + bytes && begin < pieces_.front().end) {
    if (pieces_.front().reader > flight.departed()) return std::nullopt;
    try {
      flight.wait(pieces_.front().reader);
    } catch (const DeviceError&) {  // whoever holds its ticket hears of it
    }
    pieces_.pop_front();
  }
  next_ = begin + bytes;
  pieces_.push_back({begin, next_, flight.departed() + 1});
  return View{buffer_.get(), begin};
}

}  // namespace moeflux::metal
