// moeflux-bench: prefill and decode at context frontiers. `--help` says how it measures.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>

#include "arguments.h"
#include "count.h"
#include "disk.h"
#include "machine.h"
#include "model.h"
#include "moeflux.h"
#include "next_token.h"
#include "report.h"

namespace bench {
namespace {

constexpr double probe_seconds = 1;  // of the disk

volatile std::sig_atomic_t interrupted = 0;

// A second Ctrl-C ends the process as usual.
void on_interrupt(int) {
  interrupted = 1;
  std::signal(SIGINT, SIG_DFL);
}

struct Interrupted {};

void check_interrupt() {
  if (interrupted) throw Interrupted{};
}

int64_t state_bytes(moeflux::Session& session) {
  int64_t bytes = 0;
  session.read_state([&](std::span<const moeflux::StateTensor> pieces) {
    for (const moeflux::StateTensor& each : pieces) bytes += each.bytes;
  });
  return bytes;
}

// One engine, walked over the frontiers again and again.
class Bench {
 public:
  Bench(const Arguments& arguments, int64_t threads, const moeflux::ReadBandwidth& bandwidth, Report& report)
      : arguments_(arguments), threads_(threads), bandwidth_(bandwidth), report_(report) {
    engine_ = moeflux::Engine::open(arguments.store, engine_options(arguments, threads));
    session_ = engine_->session(session_options(arguments, engine_->variant()));
    next_ = std::make_unique<NextToken>(arguments, engine_->variant().vocab_size);
    prompt_ = prompt_of(arguments.frontiers.back(), engine_->variant().vocab_size);
    streams_ = engine_->expert_slots() < engine_->experts();
    report_.begin(*engine_);
    if (arguments.roofline) measure_limits();
  }

  void walk(int64_t rep) {
    rep_ = rep;
    if (arguments_.cold) drop_from_page_cache(arguments_.store);
    session_->clear();
    for (const int64_t frontier : arguments_.frontiers) {
      prefill_to(frontier);
      if (arguments_.decode == 0) continue;
      session_->checkpoint();
      probe();
      session_->rewind(frontier);
    }
  }

 private:
  void measure_limits() {
    Limits limits;
    limits.threads = threads_;
    limits.read_bandwidth = bandwidth_.measure(static_cast<int>(threads_));
    limits.peaks = multiply_peaks(static_cast<int>(threads_));
    limits.disk_bandwidth = engine_->read_rate(probe_seconds);
    report_.add(limits);
  }

  void prefill_to(int64_t frontier) {
    const int64_t here = session_->position();
    const auto tokens = static_cast<size_t>(frontier - here);
    const std::span<const int32_t> interval(prompt_.data() + here, tokens);
    const moeflux::Progress progress = [](int64_t, int64_t) { return !interrupted; };
    Measurement m = begin("prefill");
    session_->prefill(interval, progress);
    m.sum = session_->last();
    end(m);
  }

  void probe() {
    Measurement m = begin("decode");
    if (streams_) m.disk_bandwidth = engine_->read_rate(probe_seconds);
    step();
    m.choosing_seconds = next_->seconds();
    m.bytes_touched = arguments_.decode * (engine_->step_bytes() + state_bytes(*session_));
    restart(m);
    for (int64_t i = 0; i < arguments_.decode; ++i) {
      step();
      m.sum += session_->last();
    }
    m.context = session_->position() - arguments_.decode - 1;
    m.choosing_seconds = next_->seconds() - m.choosing_seconds;
    end(m);
  }

  void step() {
    check_interrupt();
    session_->step(next_->after(*session_));
  }

  Measurement begin(const char* what) {
    check_interrupt();
    Measurement m;
    m.what = what;
    m.rep = rep_;
    m.threads = threads_;
    m.read_bandwidth = bandwidth_.measure(static_cast<int>(threads_));
    restart(m);
    return m;
  }

  void restart(Measurement& m) {
    (void)engine_->take_op_times();
    m.allocations = allocations();
    m.cpu_seconds = cpu_seconds();
    m.disk_bytes = bytes_from_disk();
    start_ = std::chrono::steady_clock::now();
  }

  void end(Measurement& m) {
    m.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    m.cpu_seconds = cpu_seconds() - m.cpu_seconds;
    m.allocations = allocations() - m.allocations;
    if (m.disk_bytes >= 0) m.disk_bytes = bytes_from_disk() - m.disk_bytes;
    check_interrupt();  // a prefill that was cut short is no measurement
    m.ops = engine_->take_op_times();
    if (!m.context) m.context = session_->position();
    m.peak_rss_bytes = peak_rss_bytes() - bandwidth_.buffer_bytes();
    m.load = load_average();
    report_.add(m);
  }

  const Arguments& arguments_;
  int64_t threads_;
  const moeflux::ReadBandwidth& bandwidth_;
  Report& report_;
  std::shared_ptr<moeflux::Engine> engine_;
  std::unique_ptr<moeflux::Session> session_;
  std::unique_ptr<NextToken> next_;
  bool streams_ = false;  // fewer slots than experts
  std::vector<int32_t> prompt_;
  int64_t rep_ = 0;
  std::chrono::steady_clock::time_point start_;
};

void run(const Arguments& arguments) {
  Report report(arguments);
  if (!arguments.count.empty()) {
    count(arguments, report);
    return;
  }
  const int64_t max_threads = *std::max_element(arguments.threads.begin(), arguments.threads.end());
  const moeflux::ReadBandwidth bandwidth(static_cast<int>(max_threads));
  try {
    for (const int64_t threads : arguments.threads) {
      Bench bench(arguments, threads, bandwidth, report);
      for (int64_t rep = 0; rep <= arguments.reps; ++rep) bench.walk(rep);
    }
  } catch (const Interrupted&) {
    report.end();
    throw;
  }
  report.end();
}

int main(const std::vector<std::string>& words) {
  try {
    const Arguments arguments = parse_arguments(words);
    if (arguments.help) {
      std::fputs(help_text, stdout);
      return 0;
    }
    std::signal(SIGINT, on_interrupt);
    run(arguments);
    return 0;
  } catch (const ArgumentError& error) {
    std::fprintf(stderr, "moeflux-bench: %s\n", error.what());
    return 2;
  } catch (const Interrupted&) {
    std::fprintf(stderr, "moeflux-bench: interrupted\n");
    return 130;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moeflux-bench: %s\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace bench

int main(int count, char** words) { return bench::main({words + 1, words + count}); }
