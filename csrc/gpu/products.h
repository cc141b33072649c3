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

// The matrix whose output meets that of the first in SwiGLU, or in what is in its place.
struct Second {
  const Matrix* matrix = nullptr;
  View bias{};
  float alpha = 0;
  float limit = 0;
  bool is_geglu = false;
};

// The products of experts: gate and up as one if they have one format, else each by itself, then down. The caller has
// how to make a product (kernel, matrix, second, bias, pairs of a row, x, out), how to make `count` numbers of gate and
// up one, and what comes between two of these, because the later one reads what the earlier one wrote.
template <typename Multiply, typename Join, typename Between>
void feed_forward(const ExpertMatrices& e, const ExpertArgs& args, Multiply multiply, Join join, Between between) {
  const ExpertFlavour& f = args.flavour;
  if (e.gate.format == e.up.format) {
    const Second up = {&e.up, f.up_bias, f.alpha, f.limit, f.geglu};
    multiply("expert_gate_up", e.gate, up, f.gate_bias, args.k, args.x, args.scratch);
  } else {  // scratch has room for both, with a row for each pair of the call
    const int64_t count = args.rows * args.k * args.intermediate;
    const View up = args.scratch.at(count);
    multiply("expert_down", e.gate, Second{}, f.gate_bias, args.k, args.x, args.scratch);
    multiply("expert_down", e.up, Second{}, f.up_bias, args.k, args.x, up);
    between();
    join(args.scratch, up, count);
  }
  between();
  multiply("expert_down", e.down, Second{}, f.down_bias, 1, args.scratch, args.out);
}

}  // namespace moeflux::gpu
