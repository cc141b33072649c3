// Experts of one row of x that the host computes, with the bits of the CUDA kernels.
//
// Threads share the work, as many as there are, and each comes when it can. None waits for one that has not come: a
// thread takes what is next, and of what others have taken it waits only for what it needs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

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

  // With the kernels of this instruction set, or if it is empty of the best. `most`: experts at once.
  HostExperts(const std::string& isa, int64_t most);

  // Whether codes of these matrices are multiplied with digits.
  static bool takes(const ExpertMatrices& expert);
  // Bytes of room that so many experts need, whatever their formats.
  static int64_t room_bytes(int64_t hidden, int64_t intermediate, int64_t experts);

  // Says what there is to do: experts of one shape and format for x [hidden]. Biases of the flavour are in the host's
  // memory. Views and pointers stay until it is done.
  void begin(std::span<const HostExpert> experts, const float* x, const ExpertFlavour& flavour, std::byte* room);
  // Does as much of it as no other thread does. All is done when at least one thread has come and all have returned.
  void work();
  // Both.
  void run(std::span<const HostExpert> experts, const float* x, const ExpertFlavour& flavour, std::byte* room,
           const Parallel& parallel);

 private:
  // x as digits for gate, the same for up if that has others; then of each expert gate, up, and what they become as
  // digits.
  struct Room {
    std::byte* begin = nullptr;
    int64_t of_x = 0;
    int64_t of_inner = 0;
    int64_t of_digits = 0;

    int64_t of_expert() const { return 2 * of_inner + of_digits; }
    uint8_t* x(int64_t which) const { return reinterpret_cast<uint8_t*>(begin + which * of_x); }
    float* gate(int64_t expert) const { return reinterpret_cast<float*>(begin + 2 * of_x + expert * of_expert()); }
    float* up(int64_t expert) const { return gate(expert) + of_inner / int64_t{sizeof(float)}; }
    uint8_t* digits(int64_t expert) const { return reinterpret_cast<uint8_t*>(up(expert)) + of_inner; }
  };
  // Of an expert: its units of gate and up that are not done, and whether what they become is there.
  struct alignas(64) Inner {
    std::atomic<int64_t> left{0};
    std::atomic<bool> is_there{false};
  };

  static Room room_of(int64_t hidden, int64_t intermediate, std::byte* begin);
  void multiply(const Matrix& matrix, int64_t first, int64_t rows, const uint8_t* row, View bias, int64_t index,
                float* out) const;
  void make_x();
  void make_inner(int64_t unit);
  void make_out(int64_t unit);

  const cpu::DigitKernels& kernels_;
  std::vector<HostExpert> experts_;
  std::vector<Inner> inner_;  // [expert]
  const float* x_ = nullptr;
  ExpertFlavour flavour_;
  Room room_;
  int64_t inner_units_ = 0;  // of an expert
  int64_t out_units_ = 0;
  alignas(64) std::atomic<bool> is_taken_{false};  // x
  std::atomic<bool> is_there_{false};
  alignas(64) std::atomic<int64_t> next_inner_{0};
  alignas(64) std::atomic<int64_t> next_out_{0};
};

}  // namespace moeflux
