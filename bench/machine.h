// What the machine is and what this process has taken of it.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

std::string cpu_name();
int cores();
double load_average();  // of the last minute; below 0 when the system does not say

// The most memory this process has had, in bytes.
int64_t peak_rss_bytes();

// Processor time that this process has used so far, on all threads, in seconds.
double cpu_seconds();

// Calls of operator new in this process so far, on any thread.
int64_t allocations();

// Reads a buffer much larger than any cache. The buffer stays resident for as long as the object lives.
class ReadBandwidth {
 public:
  explicit ReadBandwidth(int most_threads);
  ~ReadBandwidth();
  ReadBandwidth(const ReadBandwidth&) = delete;
  ReadBandwidth& operator=(const ReadBandwidth&) = delete;

  // Bytes a second of `threads` threads together, each reading a part of its own: the best of a few passes.
  double measure(int threads) const;
  int64_t buffer_bytes() const { return buffer_bytes_; }

 private:
  void* buffer_ = nullptr;
  int64_t buffer_bytes_ = 0;
};

}  // namespace bench
