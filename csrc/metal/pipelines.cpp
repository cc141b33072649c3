#include "metal/pipelines.h"

#include <utility>

#include "core/error.h"
#include "metal/shaders.h"
#include "params.h"

namespace moeflux::metal {
namespace {

// How many threads a kernel is written for, by its name or by how its name begins.
uint32_t threads_of(const std::string& kernel) {
  const auto begins = [&](const char* words) { return kernel.rfind(words, 0) == 0; };
  if (kernel == "rms_norm" || kernel == "rms_norm_in_place" || kernel == "hyper_norm" ||
      kernel == "attention_softmax" || kernel == "top_k" || kernel == "index_select")
    return row_threads;
  if (begins("matvec_") || (begins("matmul_") && !begins("matmul_transposed_")) || begins("expert_gate_up_") ||
      begins("expert_down_"))
    return lanes * product_simdgroups;
  if (kernel == "gated_delta") return lanes * delta_values;
  return lanes;
}

}  // namespace

void Pipelines::compile(const std::string& file) {
  if (compiled_.count(file)) return;
  device_.compile(file, shader_text(file));
  compiled_.insert(file);
}

const Pipelines::Ready& Pipelines::get(const std::string& file, const std::string& kernel) {
  const auto found = ready_.find(kernel);
  if (found != ready_.end()) return found->second;
  compile(file);
  Ready made = {device_.pipeline(file, kernel), threads_of(kernel)};
  if (made.pipeline->max_threads < made.threads)
    throw DeviceError(concat("kernel ", kernel, ": expected room for ", made.threads, " threads in a threadgroup, ",
                             device_.name(), " has it for ", made.pipeline->max_threads));
  return ready_.emplace(kernel, std::move(made)).first->second;
}

int64_t Pipelines::make_all(const std::string& file) {
  compile(file);
  const std::vector<std::string> kernels = device_.kernels(file);
  for (const std::string& kernel : kernels) get(file, kernel);
  return static_cast<int64_t>(kernels.size());
}

void Pipelines::make_all(bool has_blocks) {
  for (const std::string& file : shader_files())
    if (has_blocks || !file.ends_with("_blocks")) make_all(file);
}

}  // namespace moeflux::metal
