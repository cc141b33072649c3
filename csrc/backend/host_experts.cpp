#include "backend/host_experts.h"

#include <algorithm>
#include <array>
#include <cassert>

#include "backend/cpu_commands.h"
#include "core/pause.h"
#include "core/rounding.h"
#include "kernels/cpu/isa.h"

namespace moeflux {
namespace {

// Rows of a matrix that a thread makes at a time: of gate and up, and of down, whose rows are shorter.
constexpr int64_t inner_rows = 32;
constexpr int64_t out_rows = 64;
constexpr int64_t row_alignment = 64;
constexpr int64_t smallest_group = 32;

int64_t digit_bytes(int64_t columns) { return round_up(cpu::digit_row_bytes(columns, smallest_group), row_alignment); }
int64_t number_bytes(int64_t count) { return round_up(count * static_cast<int64_t>(sizeof(float)), row_alignment); }

cpu::Weights host_weights(const Matrix& matrix) {
  cpu::Weights weights = weights_of(matrix);
  weights.codes = matrix.weight.host<const uint8_t>();
  weights.scales = matrix.scales.host<const uint8_t>();
  weights.biases = matrix.biases ? matrix.biases.host<const uint8_t>() : weights.scales;
  return weights;
}

}  // namespace

HostExperts::HostExperts(const std::string& isa, int64_t most)
    : kernels_(cpu::digit_kernels(cpu::choose_isa(isa))), inner_(static_cast<size_t>(most)) {
  experts_.reserve(inner_.size());
}

bool HostExperts::takes(const ExpertMatrices& expert) {
  return std::ranges::all_of(std::array{&expert.gate, &expert.up, &expert.down}, [](const Matrix* matrix) {
    return matrix->format.is_affine() || matrix->format.is_mxfp4();
  });
}

HostExperts::Room HostExperts::room_of(int64_t hidden, int64_t intermediate, std::byte* begin) {
  return {begin, digit_bytes(hidden), number_bytes(intermediate), digit_bytes(intermediate)};
}

int64_t HostExperts::room_bytes(int64_t hidden, int64_t intermediate, int64_t experts) {
  const Room room = room_of(hidden, intermediate, nullptr);
  return 2 * room.of_x + experts * room.of_expert();
}

void HostExperts::begin(std::span<const HostExpert> experts, const float* x, const ExpertFlavour& flavour,
                        std::byte* room) {
  assert(experts.size() <= inner_.size());
  experts_.assign(experts.begin(), experts.end());
  x_ = x;
  flavour_ = flavour;
  const bool any = !experts.empty();
  const int64_t hidden = any ? experts.front().matrices.down.rows : 0;
  const int64_t intermediate = any ? experts.front().matrices.gate.rows : 0;
  room_ = room_of(hidden, intermediate, room);
  inner_units_ = divide_up(intermediate, inner_rows);
  out_units_ = divide_up(hidden, out_rows);
  for (Inner& inner : inner_) {
    inner.left = inner_units_;
    inner.is_there = false;
  }
  is_taken_ = is_there_ = false;
  next_inner_ = next_out_ = 0;
}

void HostExperts::work() {
  const auto count = static_cast<int64_t>(experts_.size());
  if (count == 0) return;
  if (!is_taken_.exchange(true)) make_x();
  const auto next = [](std::atomic<int64_t>& unit) { return unit.fetch_add(1, std::memory_order_relaxed); };
  for (int64_t unit = next(next_inner_); unit < count * inner_units_; unit = next(next_inner_)) make_inner(unit);
  for (int64_t unit = next(next_out_); unit < count * out_units_; unit = next(next_out_)) make_out(unit);
}

void HostExperts::run(std::span<const HostExpert> experts, const float* x, const ExpertFlavour& flavour,
                      std::byte* room, const Parallel& parallel) {
  begin(experts, x, flavour, room);
  parallel(static_cast<int64_t>(experts.size()) * inner_units_, [this](int64_t) { work(); });
}

void HostExperts::make_x() {
  const ExpertMatrices& like = experts_.front().matrices;
  kernels_.convert(host_weights(like.gate), x_, room_.x(0));
  if (like.gate.format != like.up.format) kernels_.convert(host_weights(like.up), x_, room_.x(1));
  is_there_.store(true, std::memory_order_release);
}

void HostExperts::multiply(const Matrix& matrix, int64_t first, int64_t rows, const uint8_t* row, View bias,
                           int64_t index, float* out) const {
  const int64_t last = std::min(first + rows, matrix.rows);
  kernels_.multiply(host_weights(matrix), first, last, row, out);
  if (!bias) return;
  const float* of_expert = bias.host<float>() + index * matrix.rows;
  for (int64_t r = first; r < last; ++r) out[r] += of_expert[r];
}

// Whoever makes the last of an expert makes digits of them.
void HostExperts::make_inner(int64_t unit) {
  await_soon([&] { return is_there_.load(std::memory_order_acquire); });
  const int64_t i = unit / inner_units_, first = unit % inner_units_ * inner_rows;
  const HostExpert& expert = experts_[static_cast<size_t>(i)];
  const ExpertMatrices& own = expert.matrices;
  float *gate = room_.gate(i), *up = room_.up(i);
  multiply(own.gate, first, inner_rows, room_.x(0), flavour_.gate_bias, expert.index, gate);
  multiply(own.up, first, inner_rows, room_.x(own.gate.format != own.up.format), flavour_.up_bias, expert.index, up);
  kernels_.join(gate + first, up + first, gate + first, std::min(inner_rows, own.gate.rows - first),
                {flavour_.alpha, flavour_.limit, flavour_.geglu});
  Inner& inner = inner_[static_cast<size_t>(i)];
  if (inner.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  kernels_.convert(host_weights(own.down), gate, room_.digits(i));
  inner.is_there.store(true, std::memory_order_release);
}

void HostExperts::make_out(int64_t unit) {
  const int64_t i = unit / out_units_, first = unit % out_units_ * out_rows;
  const HostExpert& expert = experts_[static_cast<size_t>(i)];
  await_soon([&] { return inner_[static_cast<size_t>(i)].is_there.load(std::memory_order_acquire); });
  multiply(expert.matrices.down, first, out_rows, room_.digits(i), flavour_.down_bias, expert.index, expert.out);
}

}  // namespace moeflux
