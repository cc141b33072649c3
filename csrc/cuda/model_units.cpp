#include "cuda/model_units.h"

#include <algorithm>

#include "cuda/kernel_list.h"
#include "cuda/stored_matrices.h"

namespace moeflux::cuda {
namespace {

class Wanted {
 public:
  void add(const std::string& kernel) {
    const std::string unit = unit_of(kernel).name();
    if (std::ranges::find(units_, unit) == units_.end()) units_.push_back(unit);
  }
  std::vector<std::string> take() { return std::move(units_); }

 private:
  std::vector<std::string> units_;
};

// As a matrix lies in memory: in an arena, or in an expert's slot.
bool is_aligned(const MatrixShape& matrix) { return matrix.format.is_mxfp4() || matrix.columns % part_columns == 0; }
std::string ending_of(const MatrixShape& matrix) { return format_name(matrix.format, is_aligned(matrix)); }

// Whether one row's products may have its tiles in shared memory, and a block's warps all parts of the columns.
bool is_copied(const MatrixShape& matrix) { return has_copied_format(matrix.format) && is_aligned(matrix); }

void add_products(const WorkSizes& sizes, Wanted& wanted) {
  for (const MatrixShape& matrix : sizes.matrices) {
    const std::string name = ending_of(matrix);
    const bool is_row = is_copied(matrix) && matrix.rows >= fragment_rows;
    wanted.add("matmul_few_" + name);
    if (!has_digits(matrix.format) || sizes.by_head) wanted.add("matmul_each_" + name);
    if (!has_digits(matrix.format)) continue;
    if (is_known(matrix.format) && is_aligned(matrix)) {
      wanted.add("matmul_many_" + name);
      wanted.add("matmul_most_" + name);
    }
    if (is_copied(matrix) && !are_wide(0, matrix.columns)) {
      wanted.add("norm_digits");
      wanted.add(concat("rows_", matrix.format.bits));
    }
    if (!is_row) {
      wanted.add("matmul_one_" + name);
      continue;
    }
    if (are_wide(0, matrix.columns)) {
      wanted.add(matrix.columns % (4 * part_columns) == 0 ? concat("row_wide_", matrix.format.bits)
                                                          : "matmul_one_" + name);
      continue;
    }
    wanted.add(concat("row_", matrix.format.bits));
    if (matrix.columns == sizes.delta_columns && sizes.delta_head == part_columns)
      wanted.add(concat("row_heads_", matrix.format.bits));
    // A router and the shared expert's gate and up are one launch.
    const auto has_other_bits = [&](const MatrixShape& other) {
      return is_copied(other) && other.columns == matrix.columns && other.format.bits != matrix.format.bits;
    };
    if (std::ranges::any_of(sizes.matrices, has_other_bits)) {
      wanted.add("row_4_and_8");
      wanted.add("rows_4_and_8");
    }
  }
  if (sizes.tokens) wanted.add("embed_" + bits_name(*sizes.tokens));
  if (sizes.by_head)
    for (const MatrixShape& matrix : sizes.matrices) wanted.add("matmul_transposed_" + bits_name(matrix.format));
}

void add_experts(const WorkSizes& sizes, Wanted& wanted) {
  const auto add = [&](const std::string& name, const MatrixShape& matrix) {
    const bool has_many = has_digits(matrix.format) && is_known(matrix.format) && is_aligned(matrix);
    for (const char* kind : {"_one_", "_few_"}) wanted.add(concat(name, kind, ending_of(matrix)));
    if (!has_many) return;
    if (is_copied(matrix) && are_wide(matrix.rows, matrix.columns))
      wanted.add(concat(name, "_wide_", matrix.format.bits));
    for (const char* kind : {"_many_", "_most_"}) wanted.add(concat(name, kind, ending_of(matrix)));
    if (is_copied(matrix)) wanted.add(concat(name, "_tiles_", matrix.format.bits));
  };
  for (const auto& [gate, up, down] : sizes.experts) {
    if (gate.format == up.format) {
      add("expert_gate_up", gate);
    } else {
      add("expert_down", gate);
      add("expert_down", up);
    }
    add("expert_down", down);
    if (gate.format == up.format && is_copied(gate) && is_copied(down)) {
      wanted.add(concat("routed_gate_up_", gate.format.bits));
      wanted.add(concat("expert_sum_", down.format.bits));
    }
  }
}

}  // namespace

std::vector<std::string> units_for(const WorkSizes& sizes, const std::vector<DType>& rows) {
  Wanted wanted;  // those that take longest come first, so that nobody waits for one of them alone at the end
  for (const DType type : rows) {
    wanted.add("attention_merge");
    const char* kept = type == DType::f32 ? "f32" : type == DType::bf16 ? "bf16" : "codes";
    for (const int64_t dim : sizes.value_dims) {
      if (dim == 128 || dim == 256)
        for (const char* kind : {"tiles_", "row_chunks_", "row_eights_", "row_spans_"})
          wanted.add(concat("attention_", kind, kept, "_", dim));
      if (sizes.by_head && dim == latent_dim) wanted.add(concat("attention_latent_", kept));
      for (const char* kind : {"", "chunks_", "spans_"})
        wanted.add(concat("attention_", kind, kept, "_", divide_up(dim, attention_threads)));
    }
  }
  wanted.add("rms_norm");
  wanted.add("survey");
  wanted.add("shortlist");
  if (sizes.has_streams) wanted.add("hyper_norm");
  if (sizes.selects) wanted.add("index_select");
  const auto has_own_digits = [](const MatrixShape& matrix) { return has_digits(matrix.format); };
  if (std::ranges::any_of(sizes.matrices, has_own_digits) || !sizes.experts.empty()) wanted.add("make_digits");
  add_products(sizes, wanted);
  add_experts(sizes, wanted);
  if (sizes.key_dim || sizes.has_streams)
    for (const char* kernel : {"conv1d_few", "conv1d", "conv1d_state"}) wanted.add(kernel);
  if (sizes.key_dim) {
    wanted.add("delta_gates");
    wanted.add("delta_inputs");
    wanted.add(delta_kernel(sizes.key_dim));
    if (sizes.key_dim == delta_key_dim) wanted.add("gated_delta_many");
    if (sizes.key_dim == part_columns && sizes.delta_head == part_columns) wanted.add("delta_step");
  }
  return wanted.take();
}

}  // namespace moeflux::cuda
