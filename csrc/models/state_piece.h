// One piece of what a layer remembers of a session.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace moeflux {

struct StatePiece {
  std::string_view name;       // "k": the word of snapshots
  bool rows = false;           // one row per position, in the session's type; otherwise one f32 array, zero at first
  std::vector<int64_t> shape;  // of a row, or of all of it
  int64_t unit = 1;            // positions that share a row
  int64_t window = 0;          // rows: how many of the last ones are seen at most; 0: all
  bool is_delta = false;       // of a delta-net, [heads, rows, columns]: a device may keep more behind it

  // Numbers of a row, or of all of it.
  int64_t width() const {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return count;
  }
};

// In a fixed order, that of the layer's own.
using StatePieces = std::vector<StatePiece>;

}  // namespace moeflux
