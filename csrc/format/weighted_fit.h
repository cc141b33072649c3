// Lines through numbers: value = scale * code + bias, with whole codes, so that the sum of weight * (error squared) is
// small. Conversion weighs a column by how large the activations are that it meets.
//
// A fit begins with several lines, each of which cuts another share off the ends of the range. It then alternates: the
// nearest codes for a line, the best line for these codes. Sums have a fixed number of lanes, so results are the same
// on every machine.
#pragma once

#include "core/dtype.h"

namespace moeflux {

struct Line {
  float scale = 0;
  float bias = 0;
};

struct Numbers {
  const float* values;
  const float* weights;  // 0 or more, not all of them 0
  int count;             // a multiple of 16, at most 256
};

// The weights of `count` columns: those given, or all alike if none of them counts.
const float* weights_of(const float* importance, int count);

// What a line must be to be stored: of numbers of a type, and perhaps with no bias above zero.
struct LineRule {
  DType type = DType::f32;
  bool up_to_zero = false;
};

// The nearest codes 0 ... top.
void nearest_codes(const Numbers& numbers, Line line, float top, float* codes);

// sum of weight * (value - line(code))^2
double weighted_error(const Numbers& numbers, Line line, const float* codes);

// The best line found that obeys the rule; a scale of 0 if none does. `first` is among those that are tried.
Line fit_line(const Numbers& numbers, float top, Line first, const LineRule& rule);

// The best scale found for value = scale * code with codes lowest ... -lowest - 1. It may be negative.
float fit_scale(const Numbers& numbers, int lowest);

}  // namespace moeflux
