// Experts of one row of x that the host computes, with the bits of the CUDA kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "backend/backend.h"
#include "kernels/cpu/digits.h"

namespace moeflux {

// Its matrices and its output are in the host's memory.
struct HostExpert {
  ExpertMatrices matrices;
  int64_t index = 0;     // in its layer, for biases
  float* out = nullptr;  // [hidden]
};

class HostExperts {
 public:
  // Calls a body for each of so many units, on whatever threads.
  using Parallel = std::function<void(int64_t units, const std::function<void(int64_t unit)>& body)>;

  explicit HostExperts(const cpu::DigitKernels& kernels) : kernels_(kernels) {}

  // Whether codes of these matrices are multiplied with digits.
  static bool takes(const ExpertMatrices& expert);
  // Bytes of room that so many experts like this one need.
  static int64_t room_bytes(const ExpertMatrices& like, int64_t experts);

  // Experts of one shape and format for x [hidden]. Biases of the flavour are in the host's memory.
  void run(std::span<const HostExpert> experts, const float* x, const ExpertFlavour& flavour, std::byte* room,
           const Parallel& parallel) const;

 private:
  const cpu::DigitKernels& kernels_;
};

}  // namespace moeflux
