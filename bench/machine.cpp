#include "machine.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <thread>
#include <vector>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace bench {

std::string cpu_name() {
#if defined(__APPLE__)
  char name[256] = {};
  size_t size = sizeof name - 1;
  return sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0) == 0 ? name : "unknown";
#else
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
#endif
}

int cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

double load_average() {
  double load[1];
  return getloadavg(load, 1) == 1 ? load[0] : -1;
}

int64_t peak_rss_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
#if defined(__APPLE__)
  return static_cast<int64_t>(usage.ru_maxrss);
#else
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
#endif
}

double cpu_seconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// ---- Read bandwidth ------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t part_bytes = int64_t{256} << 20;  // of a thread: beyond every cache
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

ReadBandwidth::ReadBandwidth(int most_threads) : buffer_bytes_(most_threads * part_bytes) {
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
  const auto count = static_cast<size_t>(part_bytes) / 8;
  const auto* numbers = static_cast<const uint64_t*>(buffer_);
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (size_t i = 1; i < sums.size(); ++i)
      others.emplace_back([&, i] { sums[i] = sum_of(numbers + i * count, count); });
    sums[0] = sum_of(numbers, count);
    for (std::thread& other : others) other.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, static_cast<double>(threads * part_bytes) / seconds);
  }
  volatile uint64_t kept = 0;  // or the compiler would see that nobody wants the sums
  for (const uint64_t sum : sums) kept = kept + sum;
  return best;
}

}  // namespace bench
