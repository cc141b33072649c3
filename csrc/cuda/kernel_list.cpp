#include "cuda/kernel_list.h"

#include <array>
#include <unordered_map>

#include "core/error.h"

namespace moeflux::cuda {
namespace {

using Words = std::vector<std::string>;

// Each stem with each ending, all lists one after the other.
struct Stems {
  Words stems;
  Words endings;
};
Words kernel_names(const std::vector<Stems>& lists) {
  Words all;
  for (const auto& [stems, endings] : lists)
    for (const std::string& stem : stems)
      for (const std::string& ending : endings) all.push_back(stem + ending);
  return all;
}

std::vector<KernelFile> make_list() {
  // What names end with: how a matrix is stored, as format_name has it.
  const Words bits = {"2", "3", "4", "5", "6", "8", "20"}, known = {"4_32", "4_64", "8_64", "20"};
  const Words formats = {"2", "3", "4", "5", "6", "8", "4_32", "4_64", "8_64", "20"}, plain = {"0"};
  const Words decoded = {"Q8_0", "Q4_0", "Q4_1",   "Q5_0",   "Q5_1",       "Q2_K", "Q3_K", "Q4_K",
                         "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "GGUF_MXFP4", "22",   "21"};
  const Words rows = {"f32_1", "f32_2", "bf16_1", "bf16_2", "codes_1", "codes_2"};
  const auto experts = [&](const std::string& name) {
    const Words stems = {name + "_one_", name + "_few_"};
    return kernel_names({{stems, formats}, {stems, plain}, {{name + "_many_", name + "_most_"}, known}});
  };
  const auto of_decoded = [&](const std::string& name) {
    return kernel_names({{{name + "_one_", name + "_few_"}, decoded}});
  };
  return {
      {"attention",
       kernel_names({{{"attention_"}, {"merge"}}, {{"attention_", "attention_chunks_", "attention_spans_"}, rows}}),
       true},
      {"attention_latent", kernel_names({{{"attention_latent_"}, {"f32", "bf16", "codes"}}}), true},
      {"attention_row",
       kernel_names({{{"attention_row_chunks_", "attention_row_eights_", "attention_row_spans_"},
                      {"f32_128", "f32_256", "bf16_128", "bf16_256", "codes_128", "codes_256"}}}),
       true},
      {"attention_tiles",
       kernel_names({{{"attention_tiles_f32_", "attention_tiles_bf16_", "attention_tiles_codes_"}, {"128", "256"}}}),
       true},
      {"convolution", {"conv1d_few", "conv1d", "conv1d_state"}, true},
      {"delta", {"delta_gates", "gated_delta_4", "gated_delta_8", "gated_delta_many"}, true},
      {"delta_inputs", {"delta_inputs"}},
      {"delta_step", {"delta_step", "delta_complete"}},
      {"digits", {"make_digits"}},
      {"elementwise",
       {"copy_words", "given_words", "rms_norm", "layer_norm", "rms_norm_heads", "gated_rms_norm", "swiglu",
        "residual_add", "scale", "soft_cap", "bias_add", "sigmoid_gate", "rope", "append_f32", "append_bf16",
        "append_codes", "heads_row_f32", "heads_row_bf16", "combine"}},
      {"expert_down", experts("expert_down"), true},
      {"expert_down_decoded", of_decoded("expert_down"), true},
      {"expert_gate_up", experts("expert_gate_up"), true},
      {"expert_gate_up_decoded", of_decoded("expert_gate_up"), true},
      {"expert_row", kernel_names({{{"routed_gate_up_", "expert_sum_"}, {"4", "8"}}}), true},
      {"expert_tiles", kernel_names({{{"expert_gate_up_tiles_", "expert_down_tiles_"}, {"4", "8"}}}), true},
      {"hyper", {"silu_of", "hyper_norm", "hyper_mix", "hyper_add", "ngram_gate"}},
      {"matmul", kernel_names({{{"matmul_one_", "matmul_each_"}, formats}}), true},
      {"matmul_decoded", kernel_names({{{"matmul_each_", "matmul_few_"}, decoded}}), true},
      {"matmul_rows",
       kernel_names({{{"matmul_few_"}, formats},
                     {{"matmul_many_", "matmul_most_"}, known},
                     {{"matmul_each_", "matmul_few_"}, plain}}),
       true},
      {"matrix_rows",
       kernel_names({{{"matmul_transposed_", "embed_"}, bits},
                     {{"matmul_transposed_", "embed_"}, decoded},
                     {{"matmul_transposed_", "embed_"}, plain}}),
       true},
      {"norm_rows", {"norm_digits", "gated_digits", "heads_digits"}},
      {"rows", {"rows_4", "rows_8", "rows_4_and_8"}, true},
      {"route",
       {"route_softmax", "route_softmax_few", "route_grouped", "group_experts", "route_rows", "top_k", "survey"}},
      {"row", {"row_4", "row_8", "row_4_and_8", "row_heads_4", "row_heads_8"}, true},
      {"row_wide", kernel_names({{{"row_wide_", "expert_gate_up_wide_", "expert_down_wide_"}, {"4", "8"}}}), true},
      {"selection",
       {"index_scores_f32", "index_scores_bf16", "index_scores_codes", "index_select", "gather_rows_f32",
        "gather_rows_bf16", "gather_rows_codes", "gather_scales"}},
      {"shortlist", {"shortlist_blocks", "shortlist"}},
  };
}

std::unordered_map<std::string, Unit> make_units() {
  std::unordered_map<std::string, Unit> units;
  for (const KernelFile& file : kernel_files()) {
    units[file.name] = {file.name, ""};
    for (const std::string& kernel : file.kernels) units[kernel] = {file.name, file.is_apart ? kernel : ""};
  }
  return units;
}

}  // namespace

std::span<const KernelFile> kernel_files() {
  static const std::vector<KernelFile> files = make_list();
  return files;
}

Unit unit_of(const std::string& name) {
  static const std::unordered_map<std::string, Unit> units = make_units();
  const auto found = units.find(name);
  if (found == units.end()) throw DeviceError(concat("cuda: expected a kernel or a file of kernels, found ", name));
  return found->second;
}

std::vector<Unit> units_of(const KernelFile& file) {
  if (!file.is_apart) return {{file.name, ""}};
  std::vector<Unit> units;
  for (const std::string& kernel : file.kernels) units.push_back({file.name, kernel});
  return units;
}

}  // namespace moeflux::cuda
