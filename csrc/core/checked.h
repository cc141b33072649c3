// Arithmetic on sizes that came from outside. Every sum and product that would leave int64 is an error.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace moeflux {

inline std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

inline std::optional<int64_t> checked_mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// factor * values[0] * values[1] * ...
inline std::optional<int64_t> checked_product(std::span<const int64_t> values, int64_t factor = 1) {
  std::optional<int64_t> product = factor;
  for (int64_t value : values) {
    product = checked_mul(*product, value);
    if (!product) break;
  }
  return product;
}

}  // namespace moeflux
