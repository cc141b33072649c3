#include "sampling/value_list.h"

#include <algorithm>

#include "sampling/cut.h"

namespace moeflux {

using cpu::choice_lanes;

ValueList::ValueList(int64_t room, int64_t vocab_size, bool worths)
    : room_(static_cast<size_t>(room + choice_lanes * cpu::choice_blocks(vocab_size) + cpu::spare_choice_places)),
      firsts_(static_cast<size_t>(cpu::choice_blocks(vocab_size)) + 1),
      values_(new double[room_]),
      tokens_(new int32_t[room_]),
      worths_(worths ? new double[room_] : nullptr) {}

void ValueList::end(int64_t block, size_t count) {
  const size_t whole = (count + choice_lanes - 1) / choice_lanes * choice_lanes;
  std::fill(values() + count, values() + whole, -infinity);
  std::fill(tokens() + count, tokens() + whole, 0);
  size_ += whole;
  firsts_[static_cast<size_t>(block) + 1] = size_;
}

int64_t ValueList::bytes() const {
  return bytes_of(firsts_) + static_cast<int64_t>(room_ * (sizeof(double) * (worths_ ? 2 : 1) + sizeof(int32_t)));
}

}  // namespace moeflux
