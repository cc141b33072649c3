#include "format/weighted_fit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/half.h"

namespace moeflux {
namespace {

constexpr int lanes = 8;
constexpr int most = 256;
constexpr int starts = 9;
constexpr int rounds = 4;

struct Sums {
  double w = 0, q = 0, qq = 0, x = 0, xq = 0;  // each times the weight
};

double total(const std::array<double, lanes>& parts) {
  return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

Sums sums_of(const Numbers& n, const float* codes) {
  std::array<double, lanes> w = {}, q = {}, qq = {}, x = {}, xq = {};
  for (int start = 0; start < n.count; start += lanes)
    for (int i = 0; i < lanes; ++i) {
      const double weight = n.weights[start + i];
      const double code = codes[start + i];
      const double value = n.values[start + i];
      w[i] += weight;
      q[i] += weight * code;
      qq[i] += weight * code * code;
      x[i] += weight * value;
      xq[i] += weight * value * code;
    }
  return {total(w), total(q), total(qq), total(x), total(xq)};
}

float rounded(float value, DType type) {
  if (type == DType::f32) return value;
  return type == DType::bf16 ? bf16_to_f32(f32_to_bf16(value)) : f16_to_f32(f32_to_f16(value));
}

Line stored(Line line, const LineRule& rule) {
  if (rule.up_to_zero) line.bias = std::min(line.bias, 0.0f);
  line = {rounded(line.scale, rule.type), rounded(line.bias, rule.type)};
  const bool usable = std::isfinite(line.scale) && std::isfinite(line.bias) && std::isfinite(1.0f / line.scale);
  return usable ? line : Line{};
}

// The best line for codes: the best scale, and then the bias that is best with the scale that will be there.
Line best_line(const Sums& s, const LineRule& rule) {
  const double spread = s.w * s.qq - s.q * s.q;
  if (!(spread > 0)) return {};
  const float scale = rounded(static_cast<float>((s.w * s.xq - s.x * s.q) / spread), rule.type);
  const Line line = {scale, static_cast<float>((s.x - scale * s.q) / s.w)};
  if (rule.up_to_zero && line.bias > 0.0f) return {static_cast<float>(s.xq / s.qq), 0.0f};
  return line;
}

// Adding 1.5 * 2^23 leaves the rounded number in the low bits.
float nearest_whole(float value) { return value + 0x1.8p23f - 0x1.8p23f; }

}  // namespace

const float* weights_of(const float* importance, int count) {
  static constexpr auto alike = [] {
    std::array<float, most> ones = {};
    ones.fill(1.0f);
    return ones;
  }();
  const bool counts = importance && std::any_of(importance, importance + count, [](float each) { return each > 0.0f; });
  return counts ? importance : alike.data();
}

void nearest_codes(const Numbers& n, Line line, float top, float* codes) {
  const float inverse = 1.0f / line.scale;
  for (int i = 0; i < n.count; ++i) {
    const float code = nearest_whole((n.values[i] - line.bias) * inverse);
    codes[i] = std::clamp(code, 0.0f, top);
  }
}

double weighted_error(const Numbers& n, Line line, const float* codes) {
  std::array<double, lanes> parts = {};
  for (int start = 0; start < n.count; start += lanes)
    for (int i = 0; i < lanes; ++i) {
      const double off = n.values[start + i] - (line.scale * codes[start + i] + line.bias);
      parts[i] += n.weights[start + i] * off * off;
    }
  return total(parts);
}

Line fit_line(const Numbers& n, float top, Line first, const LineRule& rule) {
  float codes[most];
  Line best;
  double least = std::numeric_limits<double>::infinity();
  const auto improve = [&](Line line) {
    for (int round = 0; round < rounds; ++round) {
      line = stored(line, rule);
      if (line.scale == 0.0f) return;
      nearest_codes(n, line, top, codes);
      const double error = weighted_error(n, line, codes);
      if (!(error < least)) {
        if (round) return;
      } else {
        least = error;
        best = line;
      }
      line = best_line(sums_of(n, codes), rule);
    }
  };
  improve(first);
  const auto [low, high] = std::minmax_element(n.values, n.values + n.count);
  // Both ends are cut alike. To cut each by itself leaves smaller errors, but they have a mean, and models were further
  // off.
  const float middle = 0.5f * (*low + *high);
  const float step = 0.5f / (top + 3.0f);
  for (int start = 0; start < starts; ++start) {
    const float scale = (*high - *low) * (1.0f - static_cast<float>(start) * step) / top;
    improve({scale, middle - 0.5f * top * scale});
  }
  return best;
}

float fit_scale(const Numbers& n, int lowest) {
  const float largest =
      *std::max_element(n.values, n.values + n.count, [](float a, float b) { return std::abs(a) < std::abs(b); });
  if (largest == 0.0f) return 0.0f;
  // An error is sum w x^2 - gain, where gain is (sum w x q)^2 / sum w q^2 with the best scale for the codes q.
  float best = 0.0f;
  double most_gained = -1.0;
  for (int start = -starts; start <= starts; ++start) {
    float inverse = (static_cast<float>(lowest) + 0.1f * static_cast<float>(start)) / largest;
    for (int round = 0; round < rounds; ++round) {
      std::array<double, lanes> xq = {}, qq = {};
      for (int at = 0; at < n.count; at += lanes)
        for (int i = 0; i < lanes; ++i) {
          const float code = std::clamp(nearest_whole(n.values[at + i] * inverse), static_cast<float>(lowest),
                                        static_cast<float>(-lowest - 1));
          xq[i] += static_cast<double>(n.weights[at + i]) * n.values[at + i] * code;
          qq[i] += static_cast<double>(n.weights[at + i]) * code * code;
        }
      const double with_codes = total(xq);
      const double of_codes = total(qq);
      if (!(of_codes > 0) || with_codes == 0.0) break;
      const double gained = with_codes * with_codes / of_codes;
      if (gained <= most_gained) break;
      most_gained = gained;
      best = static_cast<float>(with_codes / of_codes);
      inverse = 1.0f / best;
    }
  }
  return best;
}

}  // namespace moeflux
