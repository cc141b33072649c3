#include "backend/host_experts.h"

#include <algorithm>
#include <array>

#include "backend/cpu_commands.h"
#include "core/rounding.h"

namespace moeflux {
namespace {

constexpr int64_t unit_rows = 32;  // of a matrix, that a thread makes at a time
constexpr int64_t row_alignment = 64;

int64_t row_bytes(const Matrix& matrix) {
  return round_up(cpu::digit_row_bytes(matrix.columns, matrix.format.group_size), row_alignment);
}
int64_t numbers_bytes(int64_t count) { return round_up(count * static_cast<int64_t>(sizeof(float)), row_alignment); }

// x as digits for gate, the same for up; of each expert gate, up, and what they become as digits.
struct Room {
  explicit Room(const ExpertMatrices& like)
      : of_gate(row_bytes(like.gate)),
        of_up(row_bytes(like.up)),
        of_inner(numbers_bytes(like.gate.rows)),
        of_down(row_bytes(like.down)) {}

  int64_t begin(int64_t expert) const { return of_gate + of_up + expert * (2 * of_inner + of_down); }

  int64_t of_gate;
  int64_t of_up;
  int64_t of_inner;
  int64_t of_down;
};

}  // namespace

bool HostExperts::takes(const ExpertMatrices& expert) {
  return std::ranges::all_of(std::array{&expert.gate, &expert.up, &expert.down}, [](const Matrix* matrix) {
    return matrix->format.is_affine() || matrix->format.is_mxfp4();
  });
}

int64_t HostExperts::room_bytes(const ExpertMatrices& like, int64_t experts) { return Room(like).begin(experts); }

void HostExperts::run(std::span<const HostExpert> experts, const float* x, const ExpertFlavour& flavour,
                      std::byte* room, const Parallel& parallel) const {
  if (experts.empty()) return;
  const ExpertMatrices& like = experts.front().matrices;
  const Room places(like);
  const auto digits = [&](int64_t place) { return reinterpret_cast<uint8_t*>(room + place); };
  const auto numbers = [&](int64_t place) { return reinterpret_cast<float*>(room + place); };
  const auto multiply = [&](const Matrix& matrix, int64_t first, int64_t last, const uint8_t* row, View bias,
                            int64_t index, float* out) {
    kernels_.multiply(weights_of(matrix), first, last, row, out);
    if (!bias) return;
    const float* of_expert = bias.host<float>() + index * matrix.rows;
    for (int64_t r = first; r < last; ++r) out[r] += of_expert[r];
  };
  kernels_.convert(weights_of(like.gate), x, digits(0));
  kernels_.convert(weights_of(like.up), x, digits(places.of_gate));

  const auto count = std::ssize(experts);
  const int64_t inner = like.gate.rows, hidden = like.down.rows;
  const int64_t inner_units = divide_up(inner, unit_rows), units = divide_up(hidden, unit_rows);
  const cpu::DigitJoin how = {flavour.alpha, flavour.limit, flavour.geglu};
  parallel(count * inner_units, [&](int64_t unit) {
    const int64_t i = unit / inner_units, first = unit % inner_units * unit_rows;
    const int64_t last = std::min(first + unit_rows, inner);
    const HostExpert& expert = experts[static_cast<size_t>(i)];
    float* gate = numbers(places.begin(i));
    float* up = numbers(places.begin(i) + places.of_inner);
    multiply(expert.matrices.gate, first, last, digits(0), flavour.gate_bias, expert.index, gate);
    multiply(expert.matrices.up, first, last, digits(places.of_gate), flavour.up_bias, expert.index, up);
    kernels_.join(gate + first, up + first, gate + first, last - first, how);
  });
  parallel(count, [&](int64_t i) {
    kernels_.convert(weights_of(like.down), numbers(places.begin(i)), digits(places.begin(i) + 2 * places.of_inner));
  });
  parallel(count * units, [&](int64_t unit) {
    const int64_t i = unit / units, first = unit % units * unit_rows;
    const HostExpert& expert = experts[static_cast<size_t>(i)];
    multiply(expert.matrices.down, first, std::min(first + unit_rows, hidden),
             digits(places.begin(i) + 2 * places.of_inner), flavour.down_bias, expert.index, expert.out);
  });
}

}  // namespace moeflux
