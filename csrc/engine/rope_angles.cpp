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
double pair_that_turns(const Rope& rope, double times) {
  const double wavelengths = static_cast<double>(rope.yarn->original_context) / (times * 2 * std::numbers::pi);
  return static_cast<double>(rope.dim) * std::log(wavelengths) / (2 * std::log(rope.theta));
}

}  // namespace

std::vector<double> rope_frequencies(const Rope& rope) {
  const auto dim = static_cast<double>(rope.dim);
  std::vector<double> frequencies(static_cast<size_t>(rope.dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = std::pow(rope.theta, -2 * static_cast<double>(i) / dim);
  if (rope.turning) std::fill(frequencies.begin() + rope.turning, frequencies.end(), 0.0);
  if (!rope.yarn) return frequencies;
  const double fast = pair_that_turns(rope, rope.yarn->beta_fast);
  const double slow = pair_that_turns(rope, rope.yarn->beta_slow);
  const double low = std::max(rope.yarn->truncate ? std::floor(fast) : fast, 0.0);
  double high = std::min(rope.yarn->truncate ? std::ceil(slow) : slow, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / rope.yarn->factor * ramp + frequencies[i] * (1 - ramp);
  }
  return frequencies;
}

double rope_magnitude(const Rope& rope) {
  if (!rope.yarn) return 1;
  const double numerator = yarn_mscale(rope.yarn->factor, rope.yarn->mscale != 0 ? rope.yarn->mscale : 1);
  return numerator / yarn_mscale(rope.yarn->factor, rope.yarn->mscale_all_dim);
}

double rope_score_magnitude(const Rope& rope) {
  if (!rope.yarn || rope.yarn->mscale_all_dim == 0) return 1;
  return yarn_mscale(rope.yarn->factor, rope.yarn->mscale_all_dim);
}

void rope_angles(std::span<const double> frequencies, double magnitude, int64_t first, int64_t n, float* out,
                 int64_t step) {
  for (int64_t i = 0; i < n; ++i) {
    for (const double frequency : frequencies) {
      const double angle = static_cast<double>((first + i) * step) * frequency;
      *out++ = static_cast<float>(std::cos(angle) * magnitude);
      *out++ = static_cast<float>(std::sin(angle) * magnitude);
    }
  }
}

}  // namespace moeflux
