// What both GPUs ask about the matrices of products and of experts: which products one launch can do together, and
// where an expert begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/backend.h"

namespace moeflux::gpu {

// How far apart two products of one shape are: x and out in bytes, the matrix in rows, or -1 if that is no whole
// number.
struct Step {
  int64_t x = 0;
  int64_t out = 0;
  int64_t rows = 0;

  bool operator==(const Step&) const = default;
};
Step step_between(const Product& a, const Product& b);

// How many products, from the first on, are evenly apart, as those of the heads of a stack are. They take one launch.
size_t evenly_apart(std::span<const Product> products);

// The first byte of an expert.
int64_t base_of(const ExpertMatrices& expert);

}  // namespace moeflux::gpu
