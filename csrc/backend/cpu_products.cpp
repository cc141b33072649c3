// Products with matrices. They are divided by outputs, and by rows of x if there are more than a kernel takes at once.
#include <algorithm>

#include "backend/activation_observer.h"
#include "backend/cpu_commands.h"
#include "core/rounding.h"

namespace moeflux {
namespace {

// Small units let threads end together. But with several rows of x, each unit turns them to tiles again, and a unit of
// an expert goes from matrix to matrix.
constexpr int64_t step_units_per_thread = 16;
constexpr int64_t units_per_thread = 8;
constexpr int64_t output_step = 32;  // whole tiles of every kernel, and the step that transposed products need

// A part of the work on one product or job: some of its outputs for some of its rows of x.
struct Part {
  size_t of;      // which product or job
  int64_t first;  // outputs first ... last - 1
  int64_t last;
  int64_t row;  // rows of x row ... row + count - 1
  int64_t count;
};

// Finds unit `unit`. `ends` says how many units there are up to the end of each product or job i, which has extents(i)
// outputs, in steps of `step`, and rows(i) rows of x.
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
  weights.block = matrix.format.block;
  if (!matrix.format.is_quantised()) return weights;
  weights.group_size = matrix.format.group_size;
  weights.bits = matrix.format.bits;
  weights.scales = weights.biases = weights.codes;
  if (!matrix.format.has_scales()) return weights;
  weights.scales = reinterpret_cast<const uint8_t*>(matrix.scales.bytes());
  weights.biases = matrix.format.is_affine() ? reinterpret_cast<const uint8_t*>(matrix.biases.bytes()) : weights.scales;
  weights.scale_stride = matrix.format.scale_row_bytes(matrix.columns);
  weights.scale_type = matrix.format.scale_type;
  weights.row_scale_bytes = matrix.format.row_scale_bytes;
  return weights;
}

// How many outputs of n rows a unit makes, when there are `outputs` in all, each of `depth` multiply-adds.
int64_t CpuCommands::unit_outputs(int64_t outputs, int64_t depth, int64_t n, int64_t per_thread) const {
  const int64_t blocks = divide_up(n, cpu::max_block);
  const int64_t even = outputs * blocks / (pool_.threads() * per_thread);
  const int64_t worth = worthwhile / std::max<int64_t>(1, depth * std::min(n, cpu::max_block));
  return std::clamp<int64_t>(round_up(std::max(even, worth), output_step), output_step, 4096);
}

namespace {

// The rest of a matrix that is read from row `first` on.
cpu::ReadNext read_next(const Matrix& matrix, int64_t first) {
  const cpu::Weights w = weights_of(matrix);
  return {w.codes + first * w.code_stride, w.scales + first * w.scale_stride, w.biases + first * w.scale_stride};
}

}  // namespace

// ---- Rows of x -----------------------------------------------------------------------------------------------------

CpuCommands::Input CpuCommands::input_of(const Matrix& matrix, const float* x, int64_t stride, int64_t rows) {
  if (!int16_ || !matrix.format.has_whole_codes()) return {x, stride, -1};
  return {x, stride, int16_rows_.add({x, stride, rows, matrix.columns, matrix.format.group_size})};
}

void CpuCommands::convert_to_int16(const uint8_t* wanted) {
  int16_rows_.place();
  for (int64_t source = 0; source < int16_rows_.sources(); ++source) {
    const Int16Rows::Source& from = int16_rows_.source(source);
    spread(from.rows, from.columns, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        if (!wanted || wanted[i])
          int16_->convert(from.x + i * from.stride, from.columns, from.group_size, int16_rows_.row(source, i));
    });
  }
}

template <typename Row>
void CpuCommands::multiply(const Matrix& matrix, int64_t first, int64_t last, const Input& input, const Row& row,
                           float* const* out, int64_t n, const cpu::ReadNext& next) const {
  const cpu::Weights weights = weights_of(matrix);
  if (input.source < 0) {
    const float* x[cpu::max_block] = {};
    for (int64_t i = 0; i < n; ++i) x[i] = input.x + row(i) * input.stride;
    kernels_.matmul.multiply(weights, first, last, x, out, n);
  } else {
    const uint8_t* x[cpu::max_block] = {};
    for (int64_t i = 0; i < n; ++i) x[i] = int16_rows_.row(input.source, row(i));
    int16_->multiply(weights, first, last, x, out, n, next);
  }
}

// ---- matmul --------------------------------------------------------------------------------------------------------

void CpuCommands::matmul(std::span<const Product> products, int64_t n) {
  op("matmul", [&] {
    const auto extent = [&](size_t i) {
      return products[i].transposed ? products[i].matrix.columns : products[i].matrix.rows;
    };
    const auto rows = [&](size_t) { return n; };
    int64_t outputs = 0;
    int64_t depth = 0;
    lists_.inputs.clear();
    int16_rows_.clear();
    for (size_t i = 0; i < products.size(); ++i) {
      const Product& product = products[i];
      outputs += extent(i);
      depth = std::max(depth, product.transposed ? product.matrix.rows : product.matrix.columns);
      lists_.inputs.push_back(product.transposed ? Input{product.x.f32(), product.x_stride, -1}
                                                 : input_of(product.matrix, product.x.f32(), product.x_stride, n));
    }
    convert_to_int16(nullptr);
    const int64_t step = unit_outputs(outputs, depth, n, n == 1 ? step_units_per_thread : units_per_thread);
    lists_.unit_ends.clear();
    int64_t units = 0;
    for (size_t i = 0; i < products.size(); ++i)
      lists_.unit_ends.push_back(units += divide_up(extent(i), step) * divide_up(n, cpu::max_block));
    pool_.parallel(units, [&](int64_t unit) {
      const Part part = part_of(lists_.unit_ends, unit, step, extent, rows);
      const Product& product = products[part.of];
      const int64_t coming = unit + 1;
      cpu::ReadNext next;
      if (coming < units) {
        const Part then = part_of(lists_.unit_ends, coming, step, extent, rows);
        next = read_next(products[then.of].matrix, then.first);
      }
      float* out[cpu::max_block] = {};
      for (int64_t i = 0; i < part.count; ++i) out[i] = product.out.f32() + (part.row + i) * product.out_stride;
      if (!product.transposed) {
        const auto row = [&](int64_t i) { return part.row + i; };
        return multiply(product.matrix, part.first, part.last, lists_.inputs[part.of], row, out, part.count, next);
      }
      const float* x[cpu::max_block] = {};
      for (int64_t i = 0; i < part.count; ++i) x[i] = product.x.f32() + (part.row + i) * product.x_stride;
      kernels_.matmul.multiply_transposed(weights_of(product.matrix), product.matrix.rows, part.first, part.last, x,
                                          out, part.count);
    });
    if (!backend_.observer_) return;
    for (const Product& product : products)
      if (!product.transposed) backend_.observer_->saw(product, n);
  });
}

// ---- expert_ffn ----------------------------------------------------------------------------------------------------

void CpuCommands::expert_ffn(const ExpertArgs& args) {
  op("expert_ffn", [&] {
    lists_.pair_starts.clear();
    int64_t pairs = 0;
    for (const ExpertJob& job : args.jobs) {
      lists_.pair_starts.push_back(pairs);
      pairs += job.count;
    }
    gate_and_up(args);
    down(args, pairs);
    if (backend_.observer_) backend_.observer_->saw(args);
  });
}

// The ids are there, because earlier ops have run.
void CpuCommands::chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) {
  lists_.chosen.clear();
  lists_.pairs.resize(static_cast<size_t>(n * args.k));
  const auto* slots = reinterpret_cast<const uint64_t*>(args.slots.bytes());
  for (int64_t pair = 0; pair < n * args.k; ++pair) {
    const auto slot = static_cast<int64_t>(slots[args.ids.i32()[pair]]);
    const auto at = [&](const Matrix& first) {
      Matrix matrix = first;
      for (View* view : {&matrix.weight, &matrix.scales, &matrix.biases}) view->offset += slot;
      return matrix;
    };
    lists_.pairs[static_cast<size_t>(pair)] = static_cast<int32_t>(pair);
    lists_.chosen.push_back({{at(args.first.gate), at(args.first.up), at(args.first.down)},
                             &lists_.pairs[static_cast<size_t>(pair)],
                             1,
                             args.ids.i32()[pair]});
  }
  expert_ffn({args.x, n, args.hidden, args.intermediate, args.k, lists_.chosen, args.scratch, args.out, args.flavour,
              args.layer});
}

// Adds columns first ... last - 1 of an expert's bias, if there is one.
void CpuCommands::add_bias(View biases, int64_t expert, int64_t width, int64_t first, int64_t last, float* row) const {
  if (!biases) return;
  const float* bias = biases.f32() + expert * width;
  kernels_.elementwise.residual_add(row + first, bias + first, row + first, last - first);
}

// A unit makes the same few columns of gate and up, and then of what they become together, which takes the place of
// gate.
void CpuCommands::gate_and_up(const ExpertArgs& args) {
  const int64_t m = args.intermediate;
  const auto extent = [&](size_t) { return m; };
  const auto rows = [&](size_t i) { return args.jobs[i].count; };
  lists_.wanted.clear();
  for (const ExpertJob& job : args.jobs) {
    for (int64_t i = 0; i < job.count; ++i) {
      const auto token = static_cast<size_t>(job.pairs[i] / args.k);
      if (token >= lists_.wanted.size()) lists_.wanted.resize(token + 1);
      lists_.wanted[token] = 1;
    }
  }
  lists_.inputs.clear();
  int16_rows_.clear();
  for (const ExpertJob& job : args.jobs)
    for (const Matrix* matrix : {&job.expert.gate, &job.expert.up})
      lists_.inputs.push_back(input_of(*matrix, args.x.f32(), args.hidden, static_cast<int64_t>(lists_.wanted.size())));
  convert_to_int16(lists_.wanted.data());
  const int64_t step = unit_outputs(m * static_cast<int64_t>(args.jobs.size()), args.hidden, 1, units_per_thread);
  lists_.unit_ends.clear();
  int64_t units = 0;
  for (const ExpertJob& job : args.jobs)
    lists_.unit_ends.push_back(units += divide_up(m, step) * divide_up(job.count, cpu::max_block));
  pool_.parallel(units, [&](int64_t unit) {
    const Part part = part_of(lists_.unit_ends, unit, step, extent, rows);
    const ExpertJob& job = args.jobs[part.of];
    const int64_t coming = unit + 1;
    cpu::ReadNext next;
    if (coming < units) {
      const Part then = part_of(lists_.unit_ends, coming, step, extent, rows);
      next = read_next(args.jobs[then.of].expert.gate, then.first);
    }
    float* gate[cpu::max_block] = {};
    float* up[cpu::max_block] = {};
    for (int64_t i = 0; i < part.count; ++i) {
      gate[i] = args.scratch.f32() + (lists_.pair_starts[part.of] + part.row + i) * 2 * m;
      up[i] = gate[i] + m;
    }
    const auto token = [&](int64_t i) { return job.pairs[part.row + i] / args.k; };
    multiply(job.expert.gate, part.first, part.last, lists_.inputs[2 * part.of], token, gate, part.count,
             read_next(job.expert.up, part.first));
    multiply(job.expert.up, part.first, part.last, lists_.inputs[2 * part.of + 1], token, up, part.count, next);
    const ExpertFlavour& flavour = args.flavour;
    for (int64_t i = 0; i < part.count; ++i) {
      add_bias(flavour.gate_bias, job.index, m, part.first, part.last, gate[i]);
      add_bias(flavour.up_bias, job.index, m, part.first, part.last, up[i]);
      float* gated = gate[i] + part.first;
      if (flavour.geglu)
        kernels_.elementwise.geglu(gated, up[i] + part.first, gated, part.last - part.first);
      else if (flavour.limit > 0)
        kernels_.elementwise.clamped_swiglu(gated, up[i] + part.first, gated, part.last - part.first, flavour.alpha,
                                            flavour.limit);
      else
        kernels_.elementwise.swiglu(gated, up[i] + part.first, gated, part.last - part.first);
    }
  });
}

void CpuCommands::down(const ExpertArgs& args, int64_t pairs) {
  const int64_t m = args.intermediate;
  const auto extent = [&](size_t) { return args.hidden; };
  const auto rows = [&](size_t i) { return args.jobs[i].count; };
  lists_.inputs.clear();
  int16_rows_.clear();
  for (const ExpertJob& job : args.jobs)
    lists_.inputs.push_back(input_of(job.expert.down, args.scratch.f32(), 2 * m, pairs));
  convert_to_int16(nullptr);
  const int64_t step = unit_outputs(args.hidden * static_cast<int64_t>(args.jobs.size()), m, 1, units_per_thread);
  lists_.unit_ends.clear();
  int64_t units = 0;
  for (const ExpertJob& job : args.jobs)
    lists_.unit_ends.push_back(units += divide_up(args.hidden, step) * divide_up(job.count, cpu::max_block));
  pool_.parallel(units, [&](int64_t unit) {
    const Part part = part_of(lists_.unit_ends, unit, step, extent, rows);
    const ExpertJob& job = args.jobs[part.of];
    const int64_t coming = unit + 1;
    cpu::ReadNext next;
    if (coming < units) {
      const Part then = part_of(lists_.unit_ends, coming, step, extent, rows);
      next = read_next(args.jobs[then.of].expert.down, then.first);
    }
    float* out[cpu::max_block] = {};
    for (int64_t i = 0; i < part.count; ++i) out[i] = args.out.f32() + job.pairs[part.row + i] * args.hidden;
    const auto row = [&](int64_t i) { return lists_.pair_starts[part.of] + part.row + i; };
    multiply(job.expert.down, part.first, part.last, lists_.inputs[part.of], row, out, part.count, next);
    for (int64_t i = 0; i < part.count; ++i)
      add_bias(args.flavour.down_bias, job.index, args.hidden, part.first, part.last, out[i]);
  });
}

}  // namespace moeflux
