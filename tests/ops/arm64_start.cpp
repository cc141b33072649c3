// What the drivers ask of a C library, for Linux on arm64, because building a whole library takes two minutes.
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

namespace {

long call(long number, long a, long b, long c) {
  register long x8 asm("x8") = number;
  register long x0 asm("x0") = a;
  register long x1 asm("x1") = b;
  register long x2 asm("x2") = c;
  asm volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}

void write_out(const char* text, size_t bytes) { call(64, 1, reinterpret_cast<long>(text), static_cast<long>(bytes)); }

double as_double(uint64_t bits) { return __builtin_bit_cast(double, bits); }

char memory[1 << 28];  // nothing is taken before it is used, and nothing is given back
size_t taken = 0;

}  // namespace

extern "C" {

asm(".globl _start\n_start:\n  bl main\n  mov x8, #94\n  svc #0\n");  // exit_group
[[noreturn]] void abort() { __builtin_trap(); }

void* malloc(size_t bytes) {
  const size_t rounded = (bytes + 63) / 64 * 64;
  if (rounded > sizeof memory - taken) return nullptr;
  taken += rounded;
  return memory + taken - rounded;
}

void* memcpy(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}
void* memmove(void* to, const void* from, size_t bytes) {
  if (to < from) return memcpy(to, from, bytes);
  for (size_t i = bytes; i > 0; --i) static_cast<char*>(to)[i - 1] = static_cast<const char*>(from)[i - 1];
  return to;
}
void* memset(void* to, int value, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<char*>(to)[i] = static_cast<char>(value);
  return to;
}
int memcmp(const void* a, const void* b, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    if (const int d = static_cast<const uint8_t*>(a)[i] - static_cast<const uint8_t*>(b)[i]) return d;
  return 0;
}
size_t strlen(const char* text) {
  size_t length = 0;
  while (text[length]) ++length;
  return length;
}
int bcmp(const void* a, const void* b, size_t bytes) { return memcmp(a, b, bytes); }

// 2^n * exp(r), |r| < 0.35, by its series. Within some units of the last place, of numbers that it can be near to.
double exp(double x) {
  if (x != x || x > 709) return x > 709 ? as_double(0x7ff0000000000000) : x;
  if (x < -708) return 0;
  const auto n = static_cast<int64_t>(x * 1.4426950408889634 + (x < 0 ? -0.5 : 0.5));
  const double r = x - static_cast<double>(n) * 0.6931471803691238 - static_cast<double>(n) * 1.9082149292705877e-10;
  double sum = 1;
  for (int i = 17; i > 0; --i) sum = 1 + sum * r / i;
  return sum * as_double(static_cast<uint64_t>(n + 1023) << 52);
}

// log((1 + s) / (1 - s)) = 2 s + 2/3 s^3 + ..., of x halved until the series is short.
double log1p(double x) {
  if (!(x < as_double(0x7ff0000000000000))) return x;
  double halvings = 0;
  for (; x > 0.5; x = (x - 1) / 2) ++halvings;  // 1 + x = 2 (1 + (x - 1) / 2)
  const double s = x / (2 + x);
  double sum = 0;
  for (int i = 41; i > 0; i -= 2) sum = sum * s * s + 2.0 / i;
  return halvings * 0.6931471805599453 + sum * s;
}

float nextafterf(float x, float y) {
  if (x != x || y != y) return x + y;
  if (x == y) return y;
  const auto bits = __builtin_bit_cast(uint32_t, x);
  if (x == 0) return __builtin_bit_cast(float, (y < 0 ? 0x80000000u : 0u) | 1u);
  return __builtin_bit_cast(float, (x < y) == (x > 0) ? bits + 1 : bits - 1);
}

// %s, %d and %016llx.
int printf(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  for (; *format; ++format) {
    char text[20];
    char* begin = text + sizeof text;
    if (*format != '%') {
      write_out(format, 1);
    } else if (*++format == 's') {
      const char* word = va_arg(arguments, const char*);
      write_out(word, strlen(word));
    } else if (*format == 'd') {
      const int value = va_arg(arguments, int);
      uint32_t rest = value < 0 ? 0u - static_cast<uint32_t>(value) : static_cast<uint32_t>(value);
      do *--begin = static_cast<char>('0' + rest % 10);
      while (rest /= 10);
      if (value < 0) *--begin = '-';
      write_out(begin, static_cast<size_t>(text + sizeof text - begin));
    } else if (memcmp(format, "016llx", 6) == 0) {
      auto rest = va_arg(arguments, unsigned long long);
      for (int i = 0; i < 16; ++i, rest >>= 4) *--begin = "0123456789abcdef"[rest & 15];
      write_out(begin, 16);
      format += 5;
    } else {
      abort();
    }
  }
  va_end(arguments);
  return 0;
}
}
