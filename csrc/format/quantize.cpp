#include "format/quantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/half.h"
#include "format/quantize_rows.h"
#include "format/weighted_fit.h"

#ifdef __FAST_MATH__
#error "quantize.cpp promises MLX's bits: compile it without -ffast-math"
#endif
static_assert(std::endian::native == std::endian::little, "codes are a little-endian bit stream");

namespace moeflux {
namespace {

constexpr int block = 32;  // divides every group size; with a fixed trip count the compiler can vectorise
constexpr int max_group = 128;
constexpr int codes_per_pack = 8;  // eight codes of b bits are exactly b bytes

Line fit(const Range& range, float top) {
  const bool edge_is_low = std::abs(range.low) > std::abs(range.high);
  const float step = std::max((range.high - range.low) / top, 1e-7f);
  const float scale = edge_is_low ? step : -step;
  const float edge = edge_is_low ? range.low : range.high;
  const float code_of_zero = std::rint(edge / scale);
  if (code_of_zero == 0.0f) return {scale, 0.0f};
  return {edge / code_of_zero, edge};
}

// Clamping before rounding gives the same, because the bounds are whole numbers. Adding 2^23 leaves the rounded number
// in the low bits.
void encode(const float* values, int64_t count, const Line& line, float top, uint32_t* codes) {
  for (int64_t start = 0; start < count; start += block) {
    for (int i = 0; i < block; ++i) {
      float code = (values[start + i] - line.bias) / line.scale;
      code = code > 0.0f ? code : 0.0f;
      code = code < top ? code : top;
      codes[start + i] = std::bit_cast<uint32_t>(code + 0x1p23f) & 0xffu;
    }
  }
}

template <int bits>
void pack_codes(const uint32_t* codes, int64_t count, std::byte* out) {
  for (int64_t start = 0; start < count; start += codes_per_pack, out += bits) {
    uint64_t packed = 0;
    for (int i = 0; i < codes_per_pack; ++i) packed |= static_cast<uint64_t>(codes[start + i]) << (i * bits);
    std::memcpy(out, &packed, bits);
  }
}

template <int bits>
void unpack(const std::byte* in, int64_t count, uint32_t* codes) {
  for (int64_t start = 0; start < count; start += codes_per_pack, in += bits) {
    uint64_t packed = 0;
    std::memcpy(&packed, in, bits);
    for (int i = 0; i < codes_per_pack; ++i)
      codes[start + i] = static_cast<uint32_t>(packed >> (i * bits)) & ((1u << bits) - 1);
  }
}

// Calls use with the bit count as a constant.
template <typename Use>
void with_bits(int bits, const Use& use) {
  switch (bits) {
    case 2:
      return use(std::integral_constant<int, 2>());
    case 3:
      return use(std::integral_constant<int, 3>());
    case 4:
      return use(std::integral_constant<int, 4>());
    case 5:
      return use(std::integral_constant<int, 5>());
    case 6:
      return use(std::integral_constant<int, 6>());
    case 8:
      return use(std::integral_constant<int, 8>());
  }
}

// False if the number is beyond the type.
bool store_scale(float value, DType type, std::byte* out) {
  if (type == DType::f32) {
    std::memcpy(out, &value, 4);
    return std::isfinite(value);
  }
  const uint16_t raw = type == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(out, &raw, 2);
  return std::isfinite(type == DType::bf16 ? bf16_to_f32(raw) : f16_to_f32(raw));
}

float load_scale(const std::byte* in, DType type) {
  if (type == DType::f32) {
    float value;
    std::memcpy(&value, in, 4);
    return value;
  }
  uint16_t raw;
  std::memcpy(&raw, in, 2);
  return type == DType::bf16 ? bf16_to_f32(raw) : f16_to_f32(raw);
}

void check_shape(const char* where, const QuantFormat& format, int64_t rows, int64_t columns) {
  if (!format.is_affine()) throw FormatError(concat(where, " expected an affine format, found ", format.describe()));
  if (rows < 0) throw FormatError(concat(where, " rows: expected 0 or more, found ", rows));
  if (!format.fits(columns))
    throw FormatError(
        concat(where, " columns: expected a positive multiple of ", format.group_size, ", found ", columns));
}

}  // namespace

void quantize(const MatrixView& matrix, const QuantFormat& format, const AffineParts<std::byte>& parts, int threads,
              const float* importance) {
  check_shape("[quantize]", format, matrix.rows, matrix.columns);
  check_numbers("[quantize]", matrix, format);

  const int64_t columns = matrix.columns;
  const int group = format.group_size;
  const float top = static_cast<float>((1 << format.bits) - 1);
  const int64_t row_bytes = columns * static_cast<int64_t>(dtype_bytes(matrix.type));
  const int64_t scale_bytes = static_cast<int64_t>(dtype_bytes(format.scale_type));
  FirstFailure failure;

  // Stops at the first bad group, which lies in the lowest bad row of its part.
  const auto quantize_rows = [&](auto bits, int64_t begin, int64_t end) {
    float values[max_group];
    uint32_t codes[max_group];
    for (int64_t row = begin; row < end; ++row) {
      const std::byte* source = static_cast<const std::byte*>(matrix.data) + row * row_bytes;
      std::byte* words = parts.words + row * format.weight_row_bytes(columns);
      for (int64_t column = 0; column < columns; column += group) {
        load_numbers(source, matrix.type, column, group, values);
        const Range range = find_range(values, group);
        if (!range.finite) return failure.report(row, not_finite_message(place_of(row, column, group), values, column));
        Line line = fit(range, top);
        if (importance) {
          const LineRule rule = {format.scale_type};
          const Line fitted = fit_line({values, weights_of(importance + column, group), group}, top, line, rule);
          if (fitted.scale != 0.0f) line = fitted;
        }
        const int64_t scale_at = row * format.scale_row_bytes(columns) + column / group * scale_bytes;
        if (!store_scale(line.scale, format.scale_type, parts.scales + scale_at) ||
            !store_scale(line.bias, format.scale_type, parts.biases + scale_at))
          return failure.report(row, concat(place_of(row, column, group), ": expected scale and bias within ",
                                            dtype_name(format.scale_type), ", found ", line.scale, " and ", line.bias));
        encode(values, group, line, top, codes);
        pack_codes<bits>(codes, group, words + column * bits / 8);
      }
    }
  };
  with_bits(format.bits, [&](auto bits) {
    share_rows(matrix.rows, columns, threads, [&](int64_t begin, int64_t end) { quantize_rows(bits, begin, end); });
  });
  failure.raise();
}

void dequantize(const AffineParts<const std::byte>& parts, const QuantFormat& format, int64_t rows, int64_t columns,
                float* out, int threads) {
  check_shape("[dequantize]", format, rows, columns);
  const int group = format.group_size;
  const int64_t scale_bytes = static_cast<int64_t>(dtype_bytes(format.scale_type));

  const auto dequantize_rows = [&](auto bits, int64_t begin, int64_t end) {
    uint32_t codes[max_group];
    for (int64_t row = begin; row < end; ++row) {
      const std::byte* words = parts.words + row * format.weight_row_bytes(columns);
      for (int64_t column = 0; column < columns; column += group) {
        const int64_t scale_at = row * format.scale_row_bytes(columns) + column / group * scale_bytes;
        const float scale = load_scale(parts.scales + scale_at, format.scale_type);
        const float bias = load_scale(parts.biases + scale_at, format.scale_type);
        unpack<bits>(words + column * bits / 8, group, codes);
        float* target = out + row * columns + column;
        for (int start = 0; start < group; start += block)
          for (int i = 0; i < block; ++i)
            target[start + i] = static_cast<float>(static_cast<int32_t>(codes[start + i])) * scale + bias;
      }
    }
  };
  with_bits(format.bits, [&](auto bits) {
    share_rows(rows, columns, threads, [&](int64_t begin, int64_t end) { dequantize_rows(bits, begin, end); });
  });
}

}  // namespace moeflux
