#include "format/quantize_rows.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/half.h"

namespace moeflux {
namespace {

constexpr int run = 32;  // with a fixed trip count the compiler can vectorise

float widened(uint16_t raw, DType type) { return type == DType::bf16 ? bf16_to_f32(raw) : f16_to_f32(raw); }

}  // namespace

void load_numbers(const std::byte* source, DType type, int64_t first, int64_t count, float* out) {
  if (type == DType::f32) {
    std::memcpy(out, source + first * 4, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t start = 0; start < count; start += run) {
    uint16_t raw[run];
    std::memcpy(raw, source + (first + start) * 2, sizeof raw);
    for (int i = 0; i < run; ++i) out[start + i] = widened(raw[i], type);
  }
}

Range find_range(const float* values, int64_t count) {
  float low[run], high[run];
  uint32_t not_finite[run] = {};
  std::memcpy(low, values, sizeof low);
  std::memcpy(high, values, sizeof high);
  for (int64_t start = 0; start < count; start += run) {
    for (int i = 0; i < run; ++i) {
      const float value = values[start + i];
      low[i] = value < low[i] ? value : low[i];
      high[i] = value > high[i] ? value : high[i];
      not_finite[i] |= (std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
    }
  }
  Range range{low[0], high[0], true};
  for (int i = 0; i < run; ++i) {
    range.low = std::min(range.low, low[i]);
    range.high = std::max(range.high, high[i]);
    range.finite = range.finite && not_finite[i] == 0;
  }
  return range;
}

std::string place_of(int64_t row, int64_t first_column, int64_t columns) {
  return concat("[quantize] row ", row, ", columns ", first_column, " to ", first_column + columns - 1);
}

std::string not_finite_message(const std::string& where, const float* values, int64_t first_column) {
  int64_t i = 0;
  while (std::isfinite(values[i])) ++i;
  return concat(where, ": expected finite numbers, found ", values[i], " in column ", first_column + i);
}

void check_numbers(const char* where, const MatrixView& matrix, const QuantFormat& format) {
  if (matrix.rows < 0) throw FormatError(concat(where, " rows: expected 0 or more, found ", matrix.rows));
  if (!format.fits(matrix.columns))
    throw FormatError(concat(where, " columns: expected a positive multiple of ", format.whole_columns(), ", found ",
                             matrix.columns));
  if (matrix.type != DType::f32 && matrix.type != DType::bf16 && matrix.type != DType::f16)
    throw FormatError(concat(where, " expected F32, BF16 or F16 numbers, found ", dtype_name(matrix.type)));
}

}  // namespace moeflux
