// Rows of x as 16-bit integers for the products of one op. Each row is converted once, for all matrices that it meets.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "kernels/cpu/int16.h"

namespace moeflux {

class Int16Rows {
 public:
  // Row i is the `columns` numbers at x + i * stride.
  struct Source {
    const float* x = nullptr;
    int64_t stride = 0;
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t group_size = 0;
    int64_t offset = 0;  // of row 0 as integers

    int64_t row_bytes() const { return cpu::int16_row_bytes(columns, group_size); }
  };

  // Bytes that are enough for an op whose sources have so many numbers and rows together, in groups of `group` or more.
  static int64_t bytes_for(int64_t numbers, int64_t rows, int64_t group);
  // Makes room for `bytes` of integers, from up to `sources` sources.
  void reserve(int64_t bytes, int64_t sources);
  int64_t held() const;
  // What `held` is after `reserve`.
  static int64_t held_for(int64_t bytes, int64_t sources);

  // For each op: add the sources it needs, place all of them, fill the rows.
  void clear();
  // Returns its number. Matrices that meet the same rows stand together: only the last few sources are compared.
  int64_t add(Source source);
  void place();

  int64_t sources() const { return static_cast<int64_t>(sources_.size()); }
  const Source& source(int64_t i) const { return sources_[static_cast<size_t>(i)]; }
  uint8_t* row(int64_t source, int64_t i) const {
    const Source& from = sources_[static_cast<size_t>(source)];
    return reinterpret_cast<uint8_t*>(memory_->data()) + from.offset + i * from.row_bytes();
  }

 private:
  std::vector<Source> sources_;
  int64_t bytes_ = 0;  // of the sources
  std::unique_ptr<Arena> memory_;
};

}  // namespace moeflux
