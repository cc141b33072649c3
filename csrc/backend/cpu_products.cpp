// Products with matrices, divided by outputs, and by rows of x where there are more than a kernel takes at once.
#include <algorithm>

#include "backend/cpu_commands.h"

namespace moeflux {
namespace {

constexpr int64_t units_per_thread = 8;
constexpr int64_t output_step = 32;  // whole tiles of every kernel, and what transposed products ask for

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
int64_t round_up(int64_t value, int64_t step) { return divide_up(value, step) * step; }

// Part of the work on one product or job: an extent of its outputs for a block of its rows of x.
struct Part {
  size_t of;      // which product or job
  int64_t first;  // outputs first ... last - 1
  int64_t last;
  int64_t row;  // rows of x row ... row + count - 1
  int64_t count;
};

// Unit `unit` of parts whose ends are in `ends`; part i has extents(i) outputs in units of `step`, and rows(i) rows of
// x.
template <typename Extent, typename Rows>
Part part_of(const std::vector<int64_t>& ends, int64_t unit, int64_t step, const Extent& extent, const Rows& rows) {
  const size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), unit) - ends.begin());
  const int64_t within = unit - (i ? ends[i - 1] : 0);
  const int64_t steps = divide_up(extent(i), step);
  Part part;
  part.of = i;
  part.first = within % steps * step;
  part.last = std::min(part.first + step, extent(i));
  part.row = within / steps * cpu::max_block;
  part.count = std::min(cpu::max_block, rows(i) - part.row);
  return part;
}

}  // namespace

cpu::Weights weights_of(const Matrix& matrix) {
  cpu::Weights weights;
  weights.codes = reinterpret_cast<const uint8_t*>(matrix.weight.bytes());
  weights.code_stride = matrix.format.weight_row_bytes(matrix.columns);
  weights.columns = matrix.columns;
  weights.element = matrix.format.element;
  if (!matrix.format.is_affine()) return weights;
  weights.scales = reinterpret_cast<const uint8_t*>(matrix.scales.bytes());
  weights.biases = reinterpret_cast<const uint8_t*>(matrix.biases.bytes());
  weights.scale_stride = matrix.format.scale_row_bytes(matrix.columns);
  weights.group_size = matrix.format.group_size;
  weights.bits = matrix.format.bits;
  weights.scale_type = matrix.format.scale_type;
  return weights;
}

// How many outputs of n rows a unit makes, when there are `outputs` in all, each of `depth` multiply-adds.
int64_t CpuCommands::unit_outputs(int64_t outputs, int64_t depth, int64_t n) const {
  const int64_t blocks = divide_up(n, cpu::max_block);
  const int64_t even = outputs * blocks / (pool_.threads() * units_per_thread);
  const int64_t least = worthwhile / std::max<int64_t>(1, depth * std::min(n, cpu::max_block));
  return std::clamp<int64_t>(round_up(std::max(even, least), output_step), output_step, 4096);
}

void CpuCommands::matmul(std::span<const Product> products, int64_t n) {
  op("matmul", [&] {
    const auto extent = [&](size_t i) {
      return products[i].transposed ? products[i].matrix.columns : products[i].matrix.rows;
    };
    const auto rows = [&](size_t) { return n; };
    int64_t outputs = 0;
    int64_t depth = 0;
    for (size_t i = 0; i < products.size(); ++i) {
      outputs += extent(i);
      depth = std::max(depth, products[i].transposed ? products[i].matrix.rows : products[i].matrix.columns);
    }
    const int64_t step = unit_outputs(outputs, depth, n);
    unit_ends_.clear();
    int64_t units = 0;
    for (size_t i = 0; i < products.size(); ++i)
      unit_ends_.push_back(units += divide_up(extent(i), step) * divide_up(n, cpu::max_block));
    pool_.parallel(units, [&](int64_t unit) {
      const Part part = part_of(unit_ends_, unit, step, extent, rows);
      const Product& product = products[part.of];
      const float* x[cpu::max_block] = {};
      float* out[cpu::max_block] = {};
      for (int64_t i = 0; i < part.count; ++i) {
        x[i] = product.x.f32() + (part.row + i) * product.x_stride;
        out[i] = product.out.f32() + (part.row + i) * product.out_stride;
      }
      const cpu::Weights weights = weights_of(product.matrix);
      if (product.transposed)
        kernels_.matmul.multiply_transposed(weights, product.matrix.rows, part.first, part.last, x, out, part.count);
      else
        kernels_.matmul.multiply(weights, part.first, part.last, x, out, part.count);
    });
  });
}

void CpuCommands::expert_ffn(const ExpertArgs& args) {
  op("expert_ffn", [&] {
    pair_starts_.clear();
    int64_t pairs = 0;
    for (const ExpertJob& job : args.jobs) {
      pair_starts_.push_back(pairs);
      pairs += job.count;
    }
    gate_and_up(args);
    down(args);
  });
}

// A unit makes the same few columns of gate and up, and then of silu(gate) * up, which takes the place of gate.
void CpuCommands::gate_and_up(const ExpertArgs& args) {
  const int64_t m = args.intermediate;
  const auto extent = [&](size_t) { return m; };
  const auto rows = [&](size_t i) { return args.jobs[i].count; };
  const int64_t step = unit_outputs(m * static_cast<int64_t>(args.jobs.size()), args.hidden, 1);
  unit_ends_.clear();
  int64_t units = 0;
  for (const ExpertJob& job : args.jobs)
    unit_ends_.push_back(units += divide_up(m, step) * divide_up(job.count, cpu::max_block));
  pool_.parallel(units, [&](int64_t unit) {
    const Part part = part_of(unit_ends_, unit, step, extent, rows);
    const ExpertJob& job = args.jobs[part.of];
    const float* x[cpu::max_block] = {};
    float* gate[cpu::max_block] = {};
    float* up[cpu::max_block] = {};
    for (int64_t i = 0; i < part.count; ++i) {
      x[i] = args.x.f32() + job.pairs[part.row + i] / args.k * args.hidden;
      gate[i] = args.scratch.f32() + (pair_starts_[part.of] + part.row + i) * 2 * m;
      up[i] = gate[i] + m;
    }
    kernels_.matmul.multiply(weights_of(job.expert.gate), part.first, part.last, x, gate, part.count);
    kernels_.matmul.multiply(weights_of(job.expert.up), part.first, part.last, x, up, part.count);
    for (int64_t i = 0; i < part.count; ++i)
      kernels_.elementwise.swiglu(gate[i] + part.first, up[i] + part.first, gate[i] + part.first,
                                  part.last - part.first);
  });
}

void CpuCommands::down(const ExpertArgs& args) {
  const int64_t m = args.intermediate;
  const auto extent = [&](size_t) { return args.hidden; };
  const auto rows = [&](size_t i) { return args.jobs[i].count; };
  const int64_t step = unit_outputs(args.hidden * static_cast<int64_t>(args.jobs.size()), m, 1);
  unit_ends_.clear();
  int64_t units = 0;
  for (const ExpertJob& job : args.jobs)
    unit_ends_.push_back(units += divide_up(args.hidden, step) * divide_up(job.count, cpu::max_block));
  pool_.parallel(units, [&](int64_t unit) {
    const Part part = part_of(unit_ends_, unit, step, extent, rows);
    const ExpertJob& job = args.jobs[part.of];
    const float* x[cpu::max_block] = {};
    float* out[cpu::max_block] = {};
    for (int64_t i = 0; i < part.count; ++i) {
      x[i] = args.scratch.f32() + (pair_starts_[part.of] + part.row + i) * 2 * m;
      out[i] = args.out.f32() + job.pairs[part.row + i] * args.hidden;
    }
    kernels_.matmul.multiply(weights_of(job.expert.down), part.first, part.last, x, out, part.count);
  });
}

}  // namespace moeflux
