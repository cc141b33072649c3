#include "format/quantize_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "core/half.h"
#include "format/quantize_rows.h"
#include "format/weighted_fit.h"

namespace moeflux {
namespace {

constexpr int superblock = 256;
constexpr float most_of_six_bits = 63.0f;

// One block of a row. The numbers are finite; the weights are those of fit_line.
struct Source {
  const float* values;
  const float* weights;

  Numbers part(int first, int count) const { return {values + first, weights + first, count}; }
};

// The f16 nearest to a number, and what that stands for.
struct Half {
  explicit Half(float value) : raw(f32_to_f16(value)), number(f16_to_f32(raw)) {}
  uint16_t raw;
  float number;
};

void store(const Half& half, uint8_t* out) { std::memcpy(out, &half.raw, sizeof half.raw); }

// The whole number nearest to value / unit, halves to even; 0 where the unit is.
int steps(float value, float unit, int low, int high) {
  if (unit == 0.0f || !std::isfinite(1.0f / unit)) return 0;
  return static_cast<int>(std::clamp(std::nearbyint(value / unit), static_cast<float>(low), static_cast<float>(high)));
}

// ---- Q8_0 and Q4_0 -------------------------------------------------------------------------------------------------

// As GGUF's own encoder: halves away from zero, by the scale before it is rounded.
bool to_q8_0(const Source& source, uint8_t* out) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::abs(source.values[i]));
  const float scale = largest / 127.0f;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  store(Half(scale), out);
  for (int i = 0; i < 32; ++i)
    out[2 + i] =
        static_cast<uint8_t>(static_cast<int8_t>(std::clamp(std::round(source.values[i] * inverse), -127.0f, 127.0f)));
  return std::isfinite(Half(scale).number);
}

bool to_q4_0(const Source& source, uint8_t* out) {
  const Half scale(fit_scale(source.part(0, 32), -8));
  store(scale, out);
  std::array<int, 32> codes;
  for (int i = 0; i < 32; ++i) codes[static_cast<size_t>(i)] = 8 + steps(source.values[i], scale.number, -8, 7);
  for (size_t i = 0; i < 16; ++i) out[2 + i] = static_cast<uint8_t>(codes[i] | codes[i + 16] << 4);
  return std::isfinite(scale.number);
}

// ---- Q4_K and Q5_K -------------------------------------------------------------------------------------------------

// A block of eight parts, each with a scale and a minimum of 6 bits, in units that the block has.
template <int code_bits>
class LinesBlock {
 public:
  explicit LinesBlock(const Source& source) : source_(source) {}

  bool encode(uint8_t* out) {
    fit_parts();
    const Half scale(units_of(true));
    const Half minimum(units_of(false));
    Units best = {scale, minimum};
    choose_steps(best);
    double least = choose_codes(best);
    for (int round = 0; round < 3; ++round) {
      const Units refined = fit_units(best);
      const Kept kept = {steps_, codes_};
      choose_steps(refined);
      const double error = choose_codes(refined);
      if (!(error < least)) {
        steps_ = kept.steps;
        codes_ = kept.codes;
        break;
      }
      least = error;
      best = refined;
    }
    write(best, out);
    return std::isfinite(best.scale.number) && std::isfinite(best.minimum.number);
  }

 private:
  static constexpr int parts = 8;
  static constexpr int width = superblock / parts;
  static constexpr float top = static_cast<float>((1 << code_bits) - 1);

  struct Units {
    Half scale;
    Half minimum;
  };
  struct Steps {
    int scale = 0;
    int minimum = 0;
  };
  struct Kept {
    std::array<Steps, parts> steps;
    std::array<float, superblock> codes;
  };

  // value = scale * code - minimum, neither below zero.
  void fit_parts() {
    for (size_t i = 0; i < parts; ++i) {
      const Numbers numbers = source_.part(static_cast<int>(i) * width, width);
      const auto [low, high] = std::minmax_element(numbers.values, numbers.values + width);
      const float bias = std::min(*low, 0.0f);
      lines_[i] = fit_line(numbers, top, {(*high - bias) / top, bias}, {.up_to_zero = true});
      if (lines_[i].scale == 0.0f) lines_[i].bias = bias;  // a part of equal numbers
    }
  }

  float units_of(bool scales) const {
    float largest = 0;
    for (const Line& line : lines_) largest = std::max(largest, scales ? line.scale : -line.bias);
    return largest / most_of_six_bits;
  }

  static Line line_of(const Units& units, const Steps& steps) {
    return {units.scale.number * static_cast<float>(steps.scale),
            -(units.minimum.number * static_cast<float>(steps.minimum))};
  }

  double part_error(size_t i, const Line& line, float* codes) const {
    const Numbers numbers = source_.part(static_cast<int>(i) * width, width);
    if (line.scale == 0.0f || !std::isfinite(1.0f / line.scale))
      std::fill(codes, codes + width, 0.0f);
    else
      nearest_codes(numbers, line, top, codes);
    return weighted_error(numbers, line, codes);
  }

  // The nearest steps are not always the best, for the two are rounded by themselves.
  void choose_steps(const Units& units) {
    float codes[width];
    for (size_t i = 0; i < parts; ++i) {
      const Steps nearest = {steps(lines_[i].scale, units.scale.number, 0, 63),
                             steps(-lines_[i].bias, units.minimum.number, 0, 63)};
      double least = part_error(i, line_of(units, nearest), codes);
      steps_[i] = nearest;
      for (int scale = std::max(nearest.scale - 1, 0); scale <= std::min(nearest.scale + 1, 63); ++scale)
        for (int minimum = std::max(nearest.minimum - 1, 0); minimum <= std::min(nearest.minimum + 1, 63); ++minimum) {
          const double error = part_error(i, line_of(units, {scale, minimum}), codes);
          if (error < least) {
            least = error;
            steps_[i] = {scale, minimum};
          }
        }
    }
  }

  double choose_codes(const Units& units) {
    double error = 0;
    for (size_t i = 0; i < parts; ++i) error += part_error(i, line_of(units, steps_[i]), codes_.data() + i * width);
    return error;
  }

  // The best units for these steps and codes: the least squares of x = scale * a - minimum * b.
  Units fit_units(const Units& units) const {
    double aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;
    for (size_t j = 0; j < superblock; ++j) {
      const Steps& steps = steps_[j / width];
      const double weight = source_.weights[j];
      const double a = static_cast<double>(codes_[j]) * steps.scale;
      const double b = -steps.minimum;
      const double x = source_.values[j];
      aa += weight * a * a;
      ab += weight * a * b;
      bb += weight * b * b;
      xa += weight * x * a;
      xb += weight * x * b;
    }
    const double spread = aa * bb - ab * ab;
    if (spread > 1e-9 * aa * bb) {
      const double scale = (xa * bb - xb * ab) / spread;
      const double minimum = (xb * aa - xa * ab) / spread;
      if (scale >= 0 && minimum >= 0) return {Half(static_cast<float>(scale)), Half(static_cast<float>(minimum))};
      return units;
    }
    if (aa > 0 && xa > 0 && bb == 0) return {Half(static_cast<float>(xa / aa)), units.minimum};
    return units;
  }

  void write(const Units& units, uint8_t* out) const {
    store(units.scale, out);
    store(units.minimum, out + 2);
    uint8_t* packed = out + 4;
    for (size_t i = 0; i < 4; ++i) {
      const Steps& low = steps_[i];
      const Steps& high = steps_[i + 4];
      packed[i] = static_cast<uint8_t>(low.scale | high.scale >> 4 << 6);
      packed[i + 4] = static_cast<uint8_t>(low.minimum | high.minimum >> 4 << 6);
      packed[i + 8] = static_cast<uint8_t>((high.scale & 15) | (high.minimum & 15) << 4);
    }
    uint8_t* fifth = out + 16;
    uint8_t* fours = out + (code_bits == 5 ? 48 : 16);
    std::memset(fifth, 0, static_cast<size_t>(fours - fifth) + superblock / 2);
    for (size_t j = 0; j < superblock; ++j) {
      const int code = static_cast<int>(codes_[j]);
      fours[32 * (j / 64) + j % 32] |= static_cast<uint8_t>((code & 15) << (j / 32 % 2 * 4));
      if constexpr (code_bits == 5) fifth[j % 32] |= static_cast<uint8_t>(code >> 4 << (j / 32));
    }
  }

  const Source& source_;
  std::array<Line, parts> lines_;
  std::array<Steps, parts> steps_;
  std::array<float, superblock> codes_ = {};
};

// ---- Q6_K ----------------------------------------------------------------------------------------------------------

class ScalesBlock {
 public:
  explicit ScalesBlock(const Source& source) : source_(source) {}

  bool encode(uint8_t* out) {
    std::array<float, parts> scales;
    for (size_t i = 0; i < parts; ++i) scales[i] = fit_scale(source_.part(static_cast<int>(i) * width, width), -32);
    const float largest =
        *std::max_element(scales.begin(), scales.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    Half unit(largest / -128.0f);
    choose(unit.number, scales);
    const Half refined(fit_unit(unit.number));
    if (refined.number != unit.number) {
      const ScalesBlock before = *this;
      choose(refined.number, scales);
      if (error(refined.number) < before.error(unit.number)) {
        unit = refined;
      } else {
        steps_ = before.steps_;
        codes_ = before.codes_;
      }
    }
    write(unit, out);
    return std::isfinite(unit.number);
  }

 private:
  static constexpr int parts = 16;
  static constexpr int width = superblock / parts;

  // For each part the steps near to its scale that are best, and the codes.
  void choose(float unit, const std::array<float, parts>& scales) {
    for (size_t i = 0; i < parts; ++i) {
      const int nearest = steps(scales[i], unit, -128, 127);
      double least = -1;
      for (int each = std::max(nearest - 1, -128); each <= std::min(nearest + 1, 127); ++each) {
        std::array<int, width> codes;
        double sum = 0;
        const float scale = unit * static_cast<float>(each);
        for (size_t j = 0; j < width; ++j) {
          const float value = source_.values[i * width + j];
          codes[j] = steps(value, scale, -32, 31);
          const double off = value - scale * static_cast<float>(codes[j]);
          sum += source_.weights[i * width + j] * off * off;
        }
        if (least >= 0 && !(sum < least)) continue;
        least = sum;
        steps_[i] = each;
        std::copy(codes.begin(), codes.end(), codes_.begin() + static_cast<std::ptrdiff_t>(i * width));
      }
    }
  }

  double step_of(size_t j) const { return static_cast<double>(steps_[j / width]) * codes_[j]; }

  double error(float unit) const {
    double sum = 0;
    for (size_t j = 0; j < superblock; ++j) {
      const double off = source_.values[j] - unit * step_of(j);
      sum += source_.weights[j] * off * off;
    }
    return sum;
  }

  float fit_unit(float unit) const {
    double xa = 0, aa = 0;
    for (size_t j = 0; j < superblock; ++j) {
      xa += source_.weights[j] * source_.values[j] * step_of(j);
      aa += source_.weights[j] * step_of(j) * step_of(j);
    }
    return aa > 0 ? static_cast<float>(xa / aa) : unit;
  }

  void write(const Half& unit, uint8_t* out) const {
    std::memset(out, 0, 192);
    for (size_t j = 0; j < superblock; ++j) {
      const int code = codes_[j] + 32;
      const size_t half = j / 128;
      out[64 * half + j % 64] |= static_cast<uint8_t>((code & 15) << (j % 128 < 64 ? 0 : 4));
      out[128 + 32 * half + j % 32] |= static_cast<uint8_t>(code >> 4 << (j / 32 % 4 * 2));
    }
    for (size_t i = 0; i < parts; ++i) out[192 + i] = static_cast<uint8_t>(static_cast<int8_t>(steps_[i]));
    store(unit, out + 208);
  }

  const Source& source_;
  std::array<int, parts> steps_ = {};
  std::array<int, superblock> codes_ = {};
};

// ---- Rows ----------------------------------------------------------------------------------------------------------

using Encoder = bool (*)(const Source&, uint8_t*);  // false if a scale is beyond f16

Encoder encoder_of(BlockType type) {
  switch (type) {
    case BlockType::q8_0:
      return to_q8_0;
    case BlockType::q4_0:
      return to_q4_0;
    case BlockType::q4_k:
      return [](const Source& source, uint8_t* out) { return LinesBlock<4>(source).encode(out); };
    case BlockType::q5_k:
      return [](const Source& source, uint8_t* out) { return LinesBlock<5>(source).encode(out); };
    case BlockType::q6_k:
      return [](const Source& source, uint8_t* out) { return ScalesBlock(source).encode(out); };
    default:
      return nullptr;
  }
}

}  // namespace

bool can_quantize_to(const QuantFormat& format) { return encoder_of(format.block) != nullptr; }

void quantize_blocks(const MatrixView& matrix, const QuantFormat& format, const float* importance, std::byte* out,
                     int threads) {
  const Encoder encode = encoder_of(format.block);
  if (!encode)
    throw FormatError(concat("[quantize] expected Q8_0, Q4_0, Q4_K, Q5_K or Q6_K, found ", format.describe()));
  check_numbers("[quantize]", matrix, format);
  const int64_t columns = matrix.columns;
  const BlockShape& shape = block_shape(format.block);
  const int64_t row_bytes = columns * static_cast<int64_t>(dtype_bytes(matrix.type));
  FirstFailure failure;
  share_rows(matrix.rows, columns, threads, [&](int64_t begin, int64_t end) {
    std::array<float, superblock> values;
    for (int64_t row = begin; row < end; ++row) {
      const std::byte* source = static_cast<const std::byte*>(matrix.data) + row * row_bytes;
      auto* to = reinterpret_cast<uint8_t*>(out + row * format.weight_row_bytes(columns));
      for (int64_t column = 0; column < columns; column += shape.columns, to += shape.bytes) {
        load_numbers(source, matrix.type, column, shape.columns, values.data());
        const auto where = [&] { return place_of(row, column, shape.columns); };
        if (!find_range(values.data(), shape.columns).finite)
          return failure.report(row, not_finite_message(where(), values.data(), column));
        const float* weights = weights_of(importance ? importance + column : nullptr, shape.columns);
        if (!encode({values.data(), weights}, to))
          return failure.report(row, concat(where(), ": expected numbers that F16 has scales for"));
      }
    }
  });
  failure.raise();
}

}  // namespace moeflux
