// What the checks of the NEON kernels share: seeded numbers, and verdicts.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace moeflux::cpu {
namespace {

// ---- Numbers -------------------------------------------------------------------------------------------------------

uint64_t random_state = 1;

uint32_t random_bits() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(random_state >> 32);
}

// Between -1 and 1.
float random_number() { return static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f; }

// Memory until the program ends; zeroed, and something else behind it.
template <typename Element>
Element* room(int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(Element);
  char* memory = static_cast<char*>(malloc(bytes + 64));
  if (!memory) abort();
  memset(memory, 0, bytes);
  memset(memory + bytes, 0xff, 64);
  return reinterpret_cast<Element*>(memory);
}

float* numbers(int64_t count, float scale = 1) {
  float* values = room<float>(count);
  for (int64_t i = 0; i < count; ++i) values[i] = random_number() * scale;
  return values;
}

[[maybe_unused]] float* copy(const float* values, int64_t count) {
  float* other = room<float>(count);
  memcpy(other, values, static_cast<size_t>(count) * sizeof(float));
  return other;
}

[[maybe_unused]] uint16_t* bf16_numbers(int64_t count) {
  uint16_t* values = room<uint16_t>(count);
  for (int64_t i = 0; i < count; ++i) {
    const float value = random_number();
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    values[i] = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

// ---- Verdicts ------------------------------------------------------------------------------------------------------

int checks = 0;
int failures = 0;

void report(const char* kernel, bool good, double error) {
  ++checks;
  if (good) return;
  ++failures;
  printf("%s: NEON and portable are %d billionths apart\n", kernel,
         error < 2 ? static_cast<int>(error * 1e9) : 2'000'000'000);
}

[[maybe_unused]] void near(const char* kernel, const float* const (&found)[2], int64_t count, double tolerance = 4e-6) {
  double largest = 0;
  double error = 0;
  bool good = true;
  for (int64_t i = 0; i < count; ++i) {
    largest = fmax(largest, fabs(static_cast<double>(found[0][i])));
    const double apart = fabs(static_cast<double>(found[0][i]) - static_cast<double>(found[1][i]));
    good = good && apart == apart;
    error = fmax(error, apart);
  }
  // Behind the end nothing was written.
  for (const float* values : found) good = good && memcmp(values + count, "\xff\xff\xff\xff", 4) == 0;
  report(kernel, good && largest > 0 && error <= tolerance * largest, error);
}

template <typename Element>
void equal(const char* kernel, const Element* const (&found)[2], int64_t count) {
  report(kernel, memcmp(found[0], found[1], static_cast<size_t>(count) * sizeof(Element)) == 0, NAN);
}

}  // namespace
}  // namespace moeflux::cpu
