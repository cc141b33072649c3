#include "peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bench {
namespace {

constexpr int passes = 5;
constexpr int64_t rounds = 400'000;  // some milliseconds

// Runs `rounds` times as many multiply-adds as it returns. Sums do not wait for each other: a loop keeps twelve of
// them, or as many tiles as there are.
using Loop = int64_t (*)();

volatile float factor = 1;

#if defined(__x86_64__)

// Twelve sums as variables of their own, so that they stay in registers.
#define MOEFLUX_TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define MOEFLUX_DECLARE(i) \
  auto sum##i = x;         \
  asm volatile("" : "+x"(sum##i));                         /* otherwise the compiler would see that all are equal */
#define MOEFLUX_KEEP(i) asm volatile("" : : "x"(sum##i));  // otherwise the compiler would see that nobody wants it
#define MOEFLUX_LOOP(NAME, TARGET, X, LANES, ADD)      \
  __attribute__((target(TARGET))) int64_t NAME() {     \
    const auto x = X;                                  \
    MOEFLUX_TWELVE(MOEFLUX_DECLARE)                    \
    for (int64_t round = 0; round < rounds; ++round) { \
      MOEFLUX_TWELVE(ADD)                              \
    }                                                  \
    MOEFLUX_TWELVE(MOEFLUX_KEEP)                       \
    return 12 * LANES;                                 \
  }

#define ADD_F32_8(i) sum##i = _mm256_fmadd_ps(x, x, sum##i);
#define ADD_F32_16(i) sum##i = _mm512_fmadd_ps(x, x, sum##i);
#define ADD_INT8_64(i) sum##i = _mm512_dpbusd_epi32(sum##i, x, x);

MOEFLUX_LOOP(f32_avx2, "avx2,fma", _mm256_set1_ps(factor), 8, ADD_F32_8)
MOEFLUX_LOOP(f32_avx512, "avx512f", _mm512_set1_ps(factor), 16, ADD_F32_16)
MOEFLUX_LOOP(int8_vnni, "avx512f,avx512vnni", _mm512_set1_epi32(static_cast<int>(factor)), 64, ADD_INT8_64)

// Tiles of 16 rows of 64 bytes: two of weights, two of activations, four of sums.
__attribute__((target("amx-tile,amx-int8"))) int64_t int8_amx() {
  struct {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 believes that only 8 bytes of it are read
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds / 16; ++round) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return 4 * 16 * 16 * 64 / 16;
}

bool may_use_amx() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;
  unsigned a = 7, b = 0, c = 0, d = 0;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr unsigned tiles_and_int8 = 3u << 24;
  return (d & tiles_and_int8) == tiles_and_int8 && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

#elif defined(__aarch64__)

int64_t f32_neon() {
  const float32x4_t x = vdupq_n_f32(factor);
  float32x4_t sums[12] = {x, x, x, x, x, x, x, x, x, x, x, x};
  for (int64_t round = 0; round < rounds; ++round)
    for (float32x4_t& sum : sums) sum = vfmaq_f32(sum, x, x);
  for (const float32x4_t& sum : sums) asm volatile("" : : "w"(sum));
  return 12 * 4;
}

#endif

double best_of(Loop loop, int threads) {
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back([loop] { loop(); });
    const int64_t each = loop();
    for (std::thread& other : others) other.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, static_cast<double>(threads * rounds * each) / seconds);
  }
  return best;
}

}  // namespace

std::vector<Peak> multiply_peaks([[maybe_unused]] int threads) {
  std::vector<Peak> peaks;
  [[maybe_unused]] const auto add = [&](const char* isa, const char* type, Loop loop) {
    peaks.push_back({isa, type, best_of(loop, threads)});
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) add("avx2", "f32", f32_avx2);
  if (__builtin_cpu_supports("avx512f")) add("avx512", "f32", f32_avx512);
  if (__builtin_cpu_supports("avx512vnni")) add("avx512vnni", "int8", int8_vnni);
  if (may_use_amx()) add("amx", "int8", int8_amx);
#elif defined(__aarch64__)
  add("neon", "f32", f32_neon);
#endif
  return peaks;
}

}  // namespace bench
