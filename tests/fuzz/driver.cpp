// Runs a fuzz target where the compiler brings no libFuzzer.
//
//   TARGET [--seconds N | --runs N] [--seed S] [--dictionary FILE] [--save DIR] [--current FILE] DIR...
//
// First every file of the given directories, then mutations of them. The readers are compiled with
// -fsanitize-coverage=trace-pc: the calls it makes are counted by pairs of places passed one after the other, and an
// input that takes a new pair, or one clearly more often, is kept and mutated on (and saved, with --save).
// The input being run always lies in the file of --current, so that it survives however the process ends.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <stdexcept>

#include "mutate.h"
#include "target.h"

namespace {

constexpr size_t pairs = 1 << 16;  // what a uint16_t counts
constexpr size_t input_limit = 1 << 14;
constexpr unsigned run_limit_seconds = 20;  // a longer run is a finding

// Of the present run. Most inputs pass few pairs: these are listed, so that the others need no look.
uint8_t hits[pairs];
uint16_t passed[pairs];
size_t passed_count;
uintptr_t previous_place;

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  // Relative to a function of the program, so that its load address does not matter.
  const uintptr_t address = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const uintptr_t base = reinterpret_cast<uintptr_t>(&LLVMFuzzerTestOneInput);
  const uintptr_t place = ((address - base) * 0x9E3779B97F4A7C15u) >> 40;
  const uint16_t pair = static_cast<uint16_t>(place ^ previous_place);
  if (hits[pair] == 0) passed[passed_count++] = pair;
  if (hits[pair] < 255) ++hits[pair];
  previous_place = place >> 1;
}

namespace moeflux::fuzz {
namespace {

namespace fs = std::filesystem;

struct Options {
  double seconds = 0;
  uint64_t runs = 0;
  uint64_t seed = 1;
  std::string dictionary;
  std::string save;
  std::string current;
  std::vector<std::string> directories;
};

Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.substr(0, 2) != "--") {
      options.directories.push_back(name);
      continue;
    }
    if (++i == argc) throw std::runtime_error(name + ": expected a value");
    if (name == "--seconds") {
      options.seconds = std::stod(argv[i]);
    } else if (name == "--runs") {
      options.runs = std::stoull(argv[i]);
    } else if (name == "--seed") {
      options.seed = std::stoull(argv[i]);
    } else if (name == "--dictionary") {
      options.dictionary = argv[i];
    } else if (name == "--save") {
      options.save = argv[i];
    } else if (name == "--current") {
      options.current = argv[i];
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  return options;
}

// The file that holds the running input: how many ran before it and its size, 8 bytes each, then the input.
class CurrentInput {
 public:
  explicit CurrentInput(const std::string& path) {
    if (path.empty()) return;
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::runtime_error(path + ": cannot write");
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) throw std::runtime_error(path + ": cannot map");
    memory_ = static_cast<char*>(memory);
  }

  void hold(const std::string& input, uint64_t runs_before) {
    if (!memory_) return;
    const uint64_t size = input.size();
    std::memcpy(memory_, &runs_before, 8);
    std::memcpy(memory_ + 8, &size, 8);
    std::memcpy(memory_ + 16, input.data(), std::min<size_t>(input.size(), bytes - 16));
  }

 private:
  static constexpr size_t bytes = size_t{1} << 20;
  char* memory_ = nullptr;
};

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options)
      : options_(options),
        current_(options.current),
        mutator_(options.seed,
                 options.dictionary.empty() ? std::vector<std::string>() : read_dictionary(options.dictionary)) {}

  void run() {
    replay();
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    double next_report = 60;
    for (uint64_t run = 0; run < options_.runs || seconds() < options_.seconds; ++run) {
      const std::string input = mutator_.mutate(pick(), pick(), input_limit);
      if (execute(input)) keep(input);
      if (run % 1024 == 0 && seconds() > next_report) {
        report();
        next_report += 60;
      }
    }
    report();
  }

 private:
  void replay() {
    for (const std::string& directory : options_.directories) {
      std::vector<fs::path> paths;
      for (const fs::directory_entry& entry : fs::directory_iterator(directory)) paths.push_back(entry.path());
      std::sort(paths.begin(), paths.end());
      for (const fs::path& path : paths) {
        std::ifstream file(path, std::ios::binary);
        const std::string input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
        execute(input);
        corpus_.push_back(input);
      }
    }
    if (corpus_.empty()) corpus_.emplace_back();
  }

  // True when the input went where none went before.
  bool execute(const std::string& input) {
    current_.hold(input, executions_);
    while (passed_count > 0) hits[passed[--passed_count]] = 0;
    previous_place = 0;
    if (executions_ % 64 == 0) alarm(run_limit_seconds);
    ++executions_;
    // A copy of exact size, so that the sanitizer sees every read beyond it.
    const std::vector<uint8_t> exact(input.begin(), input.end());
    run_target(exact);
    bool found = false;
    for (const uint16_t i : std::span(passed, passed_count)) {
      const uint8_t often = frequency(hits[i]);
      if (seen_[i] & often) continue;
      if (seen_[i] == 0) ++edges_;
      seen_[i] = static_cast<uint8_t>(seen_[i] | often);
      found = true;
    }
    return found;
  }

  // An exception out of the target ends the process here.
  static void run_target(const std::vector<uint8_t>& input) noexcept {
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }

  static uint8_t frequency(uint8_t count) {
    if (count <= 3) return static_cast<uint8_t>(1 << (count - 1));
    return count < 8 ? 8 : count < 16 ? 16 : count < 32 ? 32 : count < 128 ? 64 : 128;
  }

  // The latest quarter of the inputs as often as all others.
  const std::string& pick() {
    const size_t recent = corpus_.size() / 4;
    const bool from_recent = recent > 0 && mutator_.below(2) == 0;
    return from_recent ? corpus_[corpus_.size() - 1 - mutator_.below(recent)] : corpus_[mutator_.below(corpus_.size())];
  }

  void keep(const std::string& input) {
    corpus_.push_back(input);
    if (options_.save.empty()) return;
    char name[32];
    std::snprintf(name, sizeof name, "%016zx", std::hash<std::string>()(input));
    std::ofstream(fs::path(options_.save) / name, std::ios::binary) << input;
  }

  void report() const {
    std::printf("%llu executions, %zu edges, %zu inputs kept\n", static_cast<unsigned long long>(executions_), edges_,
                corpus_.size());
    std::fflush(stdout);
  }

  const Options options_;
  CurrentInput current_;
  Mutator mutator_;
  std::vector<std::string> corpus_;
  std::array<uint8_t, pairs> seen_{};
  uint64_t executions_ = 0;
  size_t edges_ = 0;
};

}  // namespace
}  // namespace moeflux::fuzz

int main(int argc, char** argv) {
  try {
    moeflux::fuzz::Fuzzer(moeflux::fuzz::read_options(argc, argv)).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
