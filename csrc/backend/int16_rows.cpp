#include "backend/int16_rows.h"

#include <algorithm>

namespace moeflux {

// A row's integers are whole blocks; its groups have two floats; the row is whole cache lines.
int64_t Int16Rows::bytes_for(int64_t numbers, int64_t rows, int64_t group) {
  const int64_t rest = cpu::int16_block / group - 1;  // groups of the last block that the row does not have
  return numbers * 2 + numbers / group * 8 + rows * (cpu::int16_block_bytes + rest * 8 + 64);
}

int64_t Int16Rows::held_for(int64_t bytes, int64_t sources) {
  return (bytes > 0 ? arena_bytes(bytes) : 0) + sources * static_cast<int64_t>(sizeof(Source));
}

int64_t Int16Rows::held() const {
  return held_for(memory_ ? memory_->bytes() : 0, static_cast<int64_t>(sources_.capacity()));
}

void Int16Rows::reserve(int64_t bytes, int64_t sources) {
  sources_.reserve(static_cast<size_t>(sources));
  if (bytes <= 0 || (memory_ && memory_->bytes() >= bytes)) return;
  memory_.reset();
  memory_ = std::make_unique<Arena>(bytes, "16-bit rows");
}

void Int16Rows::clear() {
  sources_.clear();
  bytes_ = 0;
}

int64_t Int16Rows::add(Source source) {
  constexpr int64_t compared = 4;
  for (int64_t i = sources() - 1; i >= std::max<int64_t>(0, sources() - compared); --i) {
    const Source& other = sources_[static_cast<size_t>(i)];
    if (other.x == source.x && other.stride == source.stride && other.columns == source.columns &&
        other.group_size == source.group_size)
      return i;
  }
  source.offset = bytes_;
  bytes_ += source.rows * source.row_bytes();
  sources_.push_back(source);
  return sources() - 1;
}

void Int16Rows::place() { reserve(bytes_, 0); }

}  // namespace moeflux
