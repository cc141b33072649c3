// Numbers into MXFP4: codes E2M1, and a power of two for each group of 32. Of the two powers with which the largest
// number of a group is about the largest code, that of the smaller squared error is taken.
#pragma once

#include <cstddef>

#include "format/quantize.h"

namespace moeflux {

// `words` [rows, weight_row_bytes(columns)] and `scales` [rows, columns / 32] as QuantFormat::mxfp4() has them. The
// rest is as in `quantize_blocks`.
void quantize_mxfp4(const MatrixView& matrix, const float* importance, std::byte* words, std::byte* scales,
                    int threads = 0);

}  // namespace moeflux
