// Numbers into GGUF's blocks Q8_0, Q4_0, Q4_K, Q5_K and Q6_K. docs/formats.md says what a block stands for; what codes
// and scales are best is for the encoder to find. Q8_0 has the bytes of GGUF's own encoder. The others search for
// scales (and minima) of small squared error, which may be weighted.
#pragma once

#include <cstddef>

#include "format/quantize.h"

namespace moeflux {

// Whether numbers can be made blocks of this type here.
bool can_quantize_to(const QuantFormat& format);

// Rows of blocks into `out` [rows, weight_row_bytes(columns)]. `importance` is f32 [columns], all of them finite, 0 or
// more: what an error in a column weighs; null: all alike. FormatError as `quantize`, which has these threads, too.
void quantize_blocks(const MatrixView& matrix, const QuantFormat& format, const float* importance, std::byte* out,
                     int threads = 0);

}  // namespace moeflux
