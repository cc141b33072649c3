// What moeflux-bench is asked to do.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "moeflux.h"

namespace bench {

struct Arguments {
  std::string store;
  std::vector<int64_t> frontiers = {512};  // ascending
  int64_t decode = 32;                     // steps of a probe; 0: none
  std::vector<int64_t> sessions = {1};     // that decode together, one number after another
  std::vector<int64_t> threads;            // one engine for each, one after another
  int64_t slots = 0;
  int64_t host_slots = 0;
  moeflux::Reads reads = moeflux::Reads::automatic;
  int64_t readers = 0;
  moeflux::CachePolicy cache = moeflux::CachePolicy::lru;
  moeflux::LookAhead look_ahead = moeflux::LookAhead::automatic;
  moeflux::Speculate speculate = moeflux::Speculate::off;
  bool cold = false;
  bool roofline = false;
  std::string count;  // "calls", "instructions", or empty: times are measured
  int64_t reps = 3;
  int64_t chunk = 0;
  std::string backend = "auto";
  std::string isa;
  moeflux::Precision precision = moeflux::Precision::automatic;
  moeflux::DType kv = moeflux::DType::f32;
  std::string kv_name = "f32";
  std::optional<moeflux::Sampling> sampling;  // how a decode's tokens are drawn; none: the likeliest
  std::string sampling_text = "likeliest";    // the same as it was asked for
  std::string json = "-";
  bool help = false;
};

// Says where, what was expected and what was found.
struct ArgumentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Arguments parse_arguments(const std::vector<std::string>& words);

extern const char* const help_text;

}  // namespace bench
