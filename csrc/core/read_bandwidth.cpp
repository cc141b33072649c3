#include "core/read_bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "core/threads.h"

namespace moeflux {
namespace {

constexpr int passes = 3;

uint64_t sum_of(const uint64_t* numbers, size_t count) {
  uint64_t sums[16] = {};
  for (size_t i = 0; i + 16 <= count; i += 16)
    for (size_t lane = 0; lane < 16; ++lane) sums[lane] += numbers[i + lane];
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

ReadBandwidth::ReadBandwidth(int most_threads, int64_t part) : part_(part), buffer_bytes_(most_threads * part) {
  const auto bytes = static_cast<size_t>(buffer_bytes_);
  buffer_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer_ == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
  (void)madvise(buffer_, bytes, MADV_HUGEPAGE);
#endif
  std::memset(buffer_, 1, bytes);  // untouched pages are all one page of zeros
}

ReadBandwidth::~ReadBandwidth() { munmap(buffer_, static_cast<size_t>(buffer_bytes_)); }

double ReadBandwidth::measure(int threads) const {
  const auto count = static_cast<size_t>(part_) / 8;
  const auto* numbers = static_cast<const uint64_t*>(buffer_);
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    Threads others("that measure");
    for (size_t i = 1; i < sums.size(); ++i) others.start([&, i] { sums[i] = sum_of(numbers + i * count, count); });
    sums[0] = sum_of(numbers, count);
    others.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, static_cast<double>(threads * part_) / seconds);
  }
  volatile uint64_t kept = 0;  // or the compiler would see that nobody wants the sums
  for (const uint64_t sum : sums) kept = kept + sum;
  return best;
}

}  // namespace moeflux
