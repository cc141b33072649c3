#include "kernels/cpu/isa.h"

#include <cstdlib>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/cpu_features.h"
#include "core/error.h"
#include "core/text.h"

namespace moeflux::cpu {

#if defined(__x86_64__)
extern const AttentionKernels amx_attention;
extern const Int16Kernels amx_int16;
extern const AttentionKernels avx512vnni_attention;
extern const Int16Kernels avx512vnni_int16;
extern const Kernels avx512_kernels;
extern const Int16Kernels avx512_int16;
extern const Kernels avx2_kernels;
extern const Int16Kernels avx2_int16;
extern const DigitKernels avx2_digits;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
extern const Int16Kernels neon_int16;
#endif
extern const Kernels portable_kernels;
extern const DigitKernels portable_digits;

namespace {

const Int16Kernels* emulated_int16 = nullptr;
const AttentionKernels* emulated_attention = nullptr;

#if defined(__x86_64__)
// The tiles of AMX are registers that Linux gives to a process that asks for them, once for all its threads.
bool has_amx() {
#if defined(__linux__)
  if (!cpu_features().amx) return false;
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

#if defined(__x86_64__)
struct Features {
  bool avx2 = false;
  bool avx512 = false;
  bool vnni = false;
  bool tiles = false;
};

Features features() {
  const CpuFeatures& cpu = cpu_features();
  Features found;
  found.avx2 = cpu.avx2 && cpu.fma && cpu.f16c;
  found.avx512 = found.avx2 && cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq;
  found.vnni = found.avx512 && cpu.avx512vnni;
  found.tiles = found.vnni && has_amx();
  return found;
}
#endif

std::vector<Isa> detect() {
  std::vector<Isa> found;
#if defined(__x86_64__)
  const Features has = features();
  const AttentionKernels* codes = &avx512vnni_attention;
  if (has.tiles) found.push_back({"amx", &avx512_kernels, &amx_int16, codes, &amx_attention});
  if (has.vnni) found.push_back({"avx512vnni", &avx512_kernels, &avx512vnni_int16, codes});
  if (has.avx512) found.push_back({"avx512", &avx512_kernels, &avx512_int16});
  if (has.avx2) found.push_back({"avx2", &avx2_kernels, &avx2_int16});
  if (has.vnni && emulated_int16) found.push_back({"amx", &avx512_kernels, emulated_int16, codes, emulated_attention});
#elif defined(__aarch64__)
  found.push_back({"neon", &neon_kernels, &neon_int16});
#endif
  found.push_back({"portable", &portable_kernels});
  return found;
}

}  // namespace

const std::vector<Isa>& available_isas() {
  // Never destroyed: a thread may still compute while the process ends.
  static const std::vector<Isa>& isas = *new std::vector<Isa>(detect());
  return isas;
}

const DigitKernels& digit_kernels(const Isa& isa) {
#if defined(__x86_64__)
  if (isa.kernels != &portable_kernels) return avx2_digits;
#endif
  static_cast<void>(isa);
  return portable_digits;
}

std::string missing_of_amx() {
#if defined(__x86_64__)
  const Features has = features();
  return has.tiles ? "" : has.vnni ? "tiles" : "AVX-512 with VNNI";
#else
  return "x86-64";
#endif
}

void emulate_amx(const Int16Kernels* int16, const AttentionKernels* attention) {
  emulated_int16 = int16;
  emulated_attention = attention;
}

const Isa& choose_isa(const std::string& name) {
  std::string wanted = name;
  std::string where = "isa";
  if (const char* forced = std::getenv("MOEFLUX_ISA"); wanted.empty() && forced) {
    wanted = forced;
    where = "MOEFLUX_ISA";
  }
  std::string names;
  for (const Isa& isa : available_isas()) {
    if (wanted.empty() || isa.name == wanted) return isa;
    names += (names.empty() ? "" : ", ") + isa.name;
  }
  throw ArgumentError(concat(where, ": expected one that this machine has (", names, "), found ", in_quotes(wanted)));
}

Isa without_int16(const Isa& isa) {
  Isa other = isa;
  for (const Isa& each : available_isas())
    if (each.kernels == isa.kernels && !each.code_attention) other = each;
  other.int16 = nullptr;
  return other;
}

}  // namespace moeflux::cpu
