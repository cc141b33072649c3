#include "core/read_bandwidth.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "core/cpu_features.h"
#include "core/threads.h"

namespace moeflux {
namespace {

constexpr int passes = 5;
constexpr size_t line = 64;
constexpr size_t turn = 2 * line;  // bytes of a stream before it is the next one's turn

// The ways in which kernels read. Which is the fastest depends on the processor: on how many lines it prefetches by
// itself, and in how many places.
struct Way {
  size_t streams;   // which are read in turns, each through a stretch of its own
  size_t distance;  // bytes from what is read to what is prefetched; 0: nothing is
};
constexpr Way ways[] = {{1, 0}, {1, 1024}, {1, 4096}, {2, 0}, {2, 1024},
                        {4, 0}, {4, 1024}, {4, 4096}, {8, 0}, {8, 1024}};

size_t bytes_of_stream(size_t bytes, const Way& way) { return bytes / way.streams / turn * turn; }

using Loop = uint64_t (*)(const char* data, size_t bytes, const Way& way);

#define MOEFLUX_READ_LOOP(NAME, TARGET, WIDTH)                                                                   \
  TARGET uint64_t NAME(const char* data, size_t bytes, const Way& way) {                                         \
    typedef uint64_t Vector __attribute__((vector_size(WIDTH), may_alias));                                      \
    const size_t length = bytes_of_stream(bytes, way);                                                           \
    Vector sums[turn / WIDTH] = {};                                                                              \
    for (size_t at = 0; at < length; at += turn)                                                                 \
      for (size_t stream = 0; stream < way.streams; ++stream) {                                                  \
        const char* from = data + stream * length + at;                                                          \
        if (way.distance != 0)                                                                                   \
          for (size_t i = 0; i < turn; i += line) __builtin_prefetch(from + way.distance + i);                   \
        for (size_t i = 0; i < turn / WIDTH; ++i) sums[i] += *reinterpret_cast<const Vector*>(from + i * WIDTH); \
      }                                                                                                          \
    uint64_t total = 0;                                                                                          \
    for (const Vector& sum : sums)                                                                               \
      for (size_t lane = 0; lane < WIDTH / 8; ++lane) total += sum[lane];                                        \
    return total;                                                                                                \
  }

MOEFLUX_READ_LOOP(read_by_16, , 16)
#if defined(__x86_64__)
MOEFLUX_READ_LOOP(read_by_32, __attribute__((target("avx2"))), 32)
MOEFLUX_READ_LOOP(read_by_64, __attribute__((target("avx512f"))), 64)
#endif

// The loop with the widest loads. The fewer instructions a line takes, the more lines are on their way at once.
Loop widest() {
#if defined(__x86_64__)
  if (cpu_features().avx512f) return read_by_64;
  if (cpu_features().avx2) return read_by_32;
#endif
  return read_by_16;
}

}  // namespace

ReadBandwidth::ReadBandwidth(int max_threads, int64_t part) : part_(part), buffer_bytes_(max_threads * part) {
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
  const Loop loop = widest();
  const auto part = static_cast<size_t>(part_);
  const auto* data = static_cast<const char*>(buffer_);
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  const auto rate = [&](const Way& way) {
    const auto start = std::chrono::steady_clock::now();
    Threads others("that measure");
    for (size_t i = 1; i < sums.size(); ++i) others.start([&, i] { sums[i] = loop(data + i * part, part, way); });
    sums[0] = loop(data, part, way);
    others.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return static_cast<double>(sums.size() * way.streams * bytes_of_stream(part, way)) / seconds;
  };
  double best = 0;
  Way best_way = ways[0];
  for (const Way& way : ways)
    if (const double found = rate(way); found > best) {
      best = found;
      best_way = way;
    }
  for (int pass = 1; pass < passes; ++pass) best = std::max(best, rate(best_way));
  volatile uint64_t kept = 0;  // otherwise the compiler would see that nobody wants the sums
  for (const uint64_t sum : sums) kept = kept + sum;
  return best;
}

}  // namespace moeflux
