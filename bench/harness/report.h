// Measurements, as JSON lines for programs and as a table for people.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "arguments.h"
#include "moeflux.h"
#include "peak.h"

namespace bench {

// What the machine can do by itself, with so many threads.
struct Limits {
  int64_t threads = 0;
  double read_bandwidth = 0;  // bytes a second
  std::vector<Peak> peaks;
  double disk_bandwidth = 0;  // bytes a second of experts, read in the engine's way
};

// What was counted, not timed.
struct Count {
  const char* of = "";  // "prefill" or "decode"
  int64_t context = 0;  // tokens before the first step, or after the last token of a prefill
  int64_t tokens = 0;
  int64_t count = 0;
};

struct Measurement {
  const char* what = "";  // "prefill" or "decode"
  int64_t context = 0;    // tokens before the first step of a decode, or after the last token of a prefill
  int64_t rep = 0;        // 0: the cold walk
  int64_t threads = 0;
  int64_t sessions = 1;    // that decode together
  double seconds = 0;      // of the caller
  double cpu_seconds = 0;  // of all threads: more than seconds * threads is impossible, less means others had the cores
  double choosing_seconds = 0;  // of a decode: the part of `seconds` until the next token was known; 0 for a prefill
  moeflux::StepStats sum;       // of the calls that were timed
  int64_t allocations = 0;
  int64_t peak_rss_bytes = 0;
  int64_t disk_bytes = -1;    // read from disks; below 0 when the system does not say
  double disk_bandwidth = 0;  // bytes per second, measured just before; 0 when it was not
  double read_bandwidth = 0;  // bytes a second, measured just before
  int64_t bytes_touched = 0;  // of a decode of one session: by all steps together; else 0
  std::vector<moeflux::OpTime> ops;
  double load = 0;

  bool is_decode() const { return std::string_view(what) == "decode"; }
  double tokens_per_second() const { return static_cast<double>(sum.tokens) / seconds; }
  // The time divided by what the slower of disk and processor takes by itself. It is 1 when reads and computing hide
  // each other wholly.
  double over_the_bound() const {
    return seconds / std::max(static_cast<double>(sum.bytes_read) / disk_bandwidth, sum.compute_seconds);
  }
  double share() const { return static_cast<double>(bytes_touched) / seconds / read_bandwidth; }
};

class Report {
 public:
  explicit Report(const Arguments& arguments);

  // Says which engine is measured from here on.
  void begin(const moeflux::Engine& engine);
  void begin_counts(const moeflux::Engine& engine);
  void add(const Count& count);
  void add(const Limits& limits);  // what follows with as many threads is compared with them
  void add(const Measurement& measurement);
  // The medians of the warm walks.
  void end() const;

 private:
  std::string json(const Measurement& m) const;
  std::string json(const moeflux::OpTime& op, const Measurement& m) const;
  double peak(const Limits& limits) const;  // of the instruction set in use
  double shortest(const moeflux::OpTime& op, const Limits& limits) const;
  void set_constant(const moeflux::Engine& engine);
  void op_tables() const;
  void write_line(const std::string& line);

  const Arguments& arguments_;
  std::ofstream file_;
  bool to_stdout_;
  std::string constant_;  // the JSON members that all measurements of an engine share
  std::string isa_;
  std::map<int64_t, Limits> limits_;  // by the number of threads
  std::vector<Measurement> all_;
};

}  // namespace bench
