#include "engine/rope_angles.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace moeflux {
namespace {

double yarn_mscale(double factor, double coefficient) {
  return factor > 1 ? 0.1 * coefficient * std::log(factor) + 1 : 1;
}

// The (fractional) pair that turns `times` times within the original context.
double pair_that_turns(const Variant& v, double times) {
  const double wavelengths = static_cast<double>(v.yarn_original_context) / (times * 2 * std::numbers::pi);
  return static_cast<double>(v.rotary_dim) * std::log(wavelengths) / (2 * std::log(v.rope_theta));
}

}  // namespace

std::vector<double> rope_frequencies(const Variant& v) {
  const auto dim = static_cast<double>(v.rotary_dim);
  std::vector<double> frequencies(static_cast<size_t>(v.rotary_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = std::pow(v.rope_theta, -2 * static_cast<double>(i) / dim);
  if (v.rope == Rope::vanilla) return frequencies;
  const double low = std::max(std::floor(pair_that_turns(v, v.yarn_beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_that_turns(v, v.yarn_beta_slow)), dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / v.yarn_factor * ramp + frequencies[i] * (1 - ramp);
  }
  return frequencies;
}

double rope_magnitude(const Variant& v) {
  if (v.rope == Rope::vanilla) return 1;
  const double numerator = yarn_mscale(v.yarn_factor, v.yarn_mscale != 0 ? v.yarn_mscale : 1);
  return numerator / yarn_mscale(v.yarn_factor, v.yarn_mscale_all_dim);
}

double softmax_scale(const Variant& v) {
  const double scale = 1 / std::sqrt(static_cast<double>(v.head_dim));
  if (v.attention != Attention::mla || v.rope == Rope::vanilla || v.yarn_mscale_all_dim == 0) return scale;
  const double mscale = yarn_mscale(v.yarn_factor, v.yarn_mscale_all_dim);
  return scale * mscale * mscale;
}

void rope_angles(std::span<const double> frequencies, double magnitude, int64_t first, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>(first + i) * frequency;
      *out++ = static_cast<float>(std::cos(angle) * magnitude);
      *out++ = static_cast<float>(std::sin(angle) * magnitude);
    }
  }
}

}  // namespace moeflux
