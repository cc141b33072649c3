// Rotary angles: frequencies once per model, cosines and sines once per call, all in f64 and rounded once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/rope.h"

namespace moeflux {

// By how many radians each of the dim / 2 pairs turns per position.
std::vector<double> rope_frequencies(const Rope& rope);

// What YaRN multiplies rotated vectors by; 1 without it.
double rope_magnitude(const Rope& rope);

// What DeepSeek's YaRN multiplies queries and keys by, before the scores of attention; 1 without it.
double rope_score_magnitude(const Rope& rope);

// out [n, frequencies, 2]: cosine and sine at the positions first * step ... (first + n - 1) * step, times `magnitude`.
void rope_angles(std::span<const double> frequencies, double magnitude, int64_t first, int64_t n, float* out,
                 int64_t step = 1);

}  // namespace moeflux
