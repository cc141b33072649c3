// What the ops of one kind took together, and what they had to touch.
#pragma once

#include <cstdint>
#include <string>

namespace moeflux {

struct OpTime {
  std::string op;     // as backend/backend.h calls it
  std::string shape;  // of products with weights, "2048 -> 9216, 4-bit g64"; empty elsewhere
  int64_t calls = 0;
  int64_t rows = 0;    // of all calls; in expert_ffn pairs of a token and an expert
  double seconds = 0;  // of the op alone. What waits until the host says so is not timed, and not counted
  // Bytes that it cannot leave untouched: weights once per call, cached rows, state, activations in and out.
  int64_t bytes = 0;
  int64_t products = 0;  // multiply-adds of matrices and of attention
};

}  // namespace moeflux
