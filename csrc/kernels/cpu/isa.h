// Which instruction sets this machine has, and the kernels compiled for each.
#pragma once

#include <string>
#include <vector>

namespace moeflux::cpu {

struct AttentionKernels;
struct DigitKernels;
struct Int16Kernels;
struct Kernels;

struct Isa {
  std::string name;  // "portable", "avx2", "avx512", "avx512vnni", "amx", "neon"
  const Kernels* kernels;
  const Int16Kernels* int16 = nullptr;                // of matrices whose codes are whole numbers; null of "portable"
  const AttentionKernels* code_attention = nullptr;   // for tasks that fit; null where there is no VNNI
  const AttentionKernels* tiled_attention = nullptr;  // for tasks that fit; null where there are no tiles
};

// Products with the bits of the CUDA kernels, by the best that this instruction set has for them.
const DigitKernels& digit_kernels(const Isa& isa);

// The instruction sets that this build has and this machine can run, the best first. There is always one: "portable"
// runs everywhere.
const std::vector<Isa>& available_isas();

// The instruction set of that name. An empty name stands for that in the environment variable MOEFLUX_ISA, or else for
// the best one. For any other name, the ArgumentError lists those that are available.
const Isa& choose_isa(const std::string& name);

// For tests: what this machine lacks for the kernels of AMX. "tiles" when only these are missing, empty when nothing
// is.
std::string missing_of_amx();

// For tests, before anybody has asked for the sets there are: where tiles alone are missing, "amx" is there with these
// kernels, behind all that are the machine's own but "portable".
void emulate_amx(const Int16Kernels* int16, const AttentionKernels* attention);

// The one of these kernels that has nothing of VNNI and of tiles, and computes products with f32 numbers that this one
// computes with rows of 16-bit integers.
Isa without_int16(const Isa& isa);

}  // namespace moeflux::cpu
