#include "format/quantize_mxfp4.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/quant_format.h"
#include "format/quantize_rows.h"

namespace moeflux {
namespace {

constexpr int group = 32;
constexpr int codes_in_byte = 2;
constexpr int exponent_of_one = 127;
constexpr int largest_exponent = 254;
constexpr int exponent_of_largest_code = 2;  // of 6

constexpr float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

// The code of the nearest number, of two the even one. Without a sign.
uint8_t nearest_code(float size) {
  if (size <= 1.25f) return static_cast<uint8_t>((size > 0.25f) + (size >= 0.75f));
  return static_cast<uint8_t>(2 + 1 + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) + (size > 5));
}

struct Fit {
  uint8_t codes[group];
  float error;  // weighted and squared, in squares of the group's scale
};

Fit fit(const float* values, const float* importance, int exponent) {
  const float inverse = std::ldexp(1.0f, exponent_of_one - exponent);
  Fit made = {};
  for (int i = 0; i < group; ++i) {
    const float size = std::abs(values[i]) * inverse;
    const uint8_t code = nearest_code(size);
    made.codes[i] = static_cast<uint8_t>(code | (code != 0 && values[i] < 0 ? 8 : 0));
    const float off = size - sizes[code];
    made.error += (importance ? importance[i] : 1.0f) * off * off;
  }
  return made;
}

void store(const Fit& fit, std::byte* words) {
  for (int i = 0; i < group; i += codes_in_byte)
    words[i / codes_in_byte] = static_cast<std::byte>(fit.codes[i] | fit.codes[i + 1] << 4);
}

}  // namespace

void quantize_mxfp4(const MatrixView& matrix, const float* importance, std::byte* words, std::byte* scales,
                    int threads) {
  const QuantFormat format = QuantFormat::mxfp4();
  const int64_t columns = matrix.columns;
  const int64_t row_bytes = columns * static_cast<int64_t>(dtype_bytes(matrix.type));
  FirstFailure failure;
  share_rows(matrix.rows, columns, threads, [&](int64_t begin, int64_t end) {
    float values[group];
    for (int64_t row = begin; row < end; ++row) {
      const std::byte* source = static_cast<const std::byte*>(matrix.data) + row * row_bytes;
      for (int64_t column = 0; column < columns; column += group) {
        load_numbers(source, matrix.type, column, group, values);
        const Range range = find_range(values, group);
        if (!range.finite) return failure.report(row, not_finite_message(place_of(row, column, group), values, column));
        const float largest = std::max(std::abs(range.low), std::abs(range.high));
        const int lower = largest > 0 ? std::ilogb(largest) - exponent_of_largest_code + exponent_of_one : 0;
        const float* weights = importance ? importance + column : nullptr;
        int exponent = std::clamp(lower, 0, largest_exponent);
        Fit best = fit(values, weights, exponent);
        if (const int higher = std::clamp(lower + 1, 0, largest_exponent); higher != exponent) {
          const Fit other = fit(values, weights, higher);
          if (4 * other.error < best.error) {
            best = other;
            exponent = higher;
          }
        }
        store(best, words + row * format.weight_row_bytes(columns) + column / codes_in_byte);
        scales[row * (columns / group) + column / group] = static_cast<std::byte>(exponent);
      }
    }
  });
  failure.raise();
}

}  // namespace moeflux
