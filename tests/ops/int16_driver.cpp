// Products of whole numbers in every format, of one instruction set: prints a number for each that stands for all of
// its bits. The same seeds must give the same numbers on every instruction set.
//
// Freestanding but for the C library, as neon_driver.cpp is.
#include <stdint.h>
#include <stdio.h>

#include "kernels/cpu/int16.h"
#include "matrices.h"
#include "neon_checks.h"

namespace moeflux::cpu {

#if defined(__aarch64__)
extern const Int16Kernels neon_int16;
#define KERNELS neon_int16
#else
extern const Int16Kernels avx2_int16;
#define KERNELS avx2_int16
#endif

namespace {

void multiply(const char* format, const Weights& weights, int64_t rows, int64_t n) {
  const uint8_t* x[max_block];
  float* out[max_block];
  for (int64_t i = 0; i < n; ++i) {
    float* row = numbers(weights.columns);
    for (int64_t j = 0; j < weights.columns; j += 37) row[j] *= 100;  // some take the digits of their neighbours
    if (i % 3 == 2) memset(row, 0, 4 * sizeof *row);
    uint8_t* whole = room<uint8_t>(int16_row_bytes(weights.columns, weights.group_size) + 64);
    whole += 64 - reinterpret_cast<uintptr_t>(whole) % 64;
    KERNELS.convert(row, weights.columns, weights.group_size, whole);
    x[i] = whole;
    out[i] = room<float>(rows);
  }
  KERNELS.multiply(weights, 0, rows, x, out, n, {});
  uint64_t bits = 14695981039346656037u;  // FNV-1a
  bool good = true;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t word;
      memcpy(&word, &out[i][r], sizeof word);
      bits = (bits ^ word) * 1099511628211u;
      good = good && out[i][r] == out[i][r];
    }
    good = good && memcmp(out[i] + rows, "\xff\xff\xff\xff", 4) == 0;  // behind the end nothing was written
  }
  printf("%s of %d bits, groups of %d, %d columns, %d rows, %d of x: %s%016llx\n", format, weights.bits,
         static_cast<int>(weights.group_size), static_cast<int>(weights.columns), static_cast<int>(rows),
         static_cast<int>(n), good ? "" : "not finite, or beyond the end: ", static_cast<unsigned long long>(bits));
}

void multiply_all() {
  for (int64_t n : {1, 3, 17}) {
    for (int64_t rows : {1, 3, 8, 37}) {
      for (DType type : {DType::bf16, DType::f16, DType::f32})
        for (int bits : {2, 3, 4, 5, 6, 8})
          for (int64_t group : {32, 64, 128})
            multiply("affine", matrix_of(bits, group, type, rows, (rows % 3 + 1) * group), rows, n);
      for (const Weights& format : float_formats)
        if (format.bits == 4) multiply("E2M1", matrix_of(format, rows, 32 * (rows % 5 + 3)), rows, n);
      for (const BlockShape& shape : block_shapes) multiply("blocks", matrix_of(shape, rows, rows % 4 + 1), rows, n);
    }
  }
}

}  // namespace
}  // namespace moeflux::cpu

int main() {
  moeflux::cpu::multiply_all();
  return 0;
}
