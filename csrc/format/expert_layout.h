// Where the nine pieces of one routed expert lie, contiguous and unpadded:
//   gate weight, scales, biases | up weight, scales, biases | down weight, scales, biases
// gate and up are [intermediate, hidden], down is [hidden, intermediate]. A plain matrix is its weight alone, and one
// of MXFP4 has no biases.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/quant_format.h"

namespace moeflux {

// The same for every expert of a store.
struct ExpertFormats {
  QuantFormat gate;
  QuantFormat up;
  QuantFormat down;

  std::string describe() const;  // "gate_proj 4-bit g64, up_proj ..., down_proj ..."
  bool operator==(const ExpertFormats&) const = default;
};

struct ExpertPiece {
  std::string name;    // "gate_proj.weight"
  int64_t offset = 0;  // from the start of the expert
  int64_t bytes = 0;
  DType dtype = DType::u32;
  std::vector<int64_t> shape;  // as stored, of one expert
};

struct ExpertLayout {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  ExpertFormats formats;
  std::vector<ExpertPiece> pieces;
  int64_t bytes = 0;  // of one expert

  ExpertLayout() = default;
  // FormatError when a format does not fit a width.
  ExpertLayout(int64_t hidden, int64_t intermediate, const ExpertFormats& formats);
};

}  // namespace moeflux
