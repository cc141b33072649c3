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
    const int64_t vocab = engine_->variant().vocab_size;
    for (int64_t i = 0; i < *std::max_element(arguments.sessions.begin(), arguments.sessions.end()); ++i)
      answers_.push_back({engine_->session(session_options(arguments, engine_->variant())),
                          NextToken(arguments, vocab, i), prompt_of(arguments.frontiers.back(), vocab, i)});
    tokens_.resize(answers_.size());
    work_.resize(answers_.size());
    streams_ = engine_->expert_slots() < engine_->experts();
    report_.begin(*engine_);
    if (arguments.roofline) measure_limits();
  }

  void walk(int64_t rep) {
    rep_ = rep;
    if (arguments_.cold) drop_from_page_cache(arguments_.store);
    for (const Answer& answer : answers_) answer.session->clear();
    for (const int64_t frontier : arguments_.frontiers) {
      prefill_to(frontier);
      if (arguments_.decode == 0) continue;
      for (size_t i = 1; i < answers_.size(); ++i) prefill(answers_[i], frontier);
      for (Answer& answer : answers_) {
        answer.first = answer.next.after(*answer.session);  // its logits are gone after a rewind
        answer.session->checkpoint();
      }
      for (const int64_t sessions : arguments_.sessions) {
        probe(static_cast<size_t>(sessions));
        for (const Answer& answer : answers_) answer.session->rewind(frontier);
      }
    }
  }

 private:
  struct Answer {
    std::unique_ptr<moeflux::Session> session;
    NextToken next;
    std::vector<int32_t> prompt;
    int32_t first = 0;  // token after the frontier
  };

  void measure_limits() {
    Limits limits;
    limits.threads = threads_;
    limits.read_bandwidth = engine_->device_rate();
    if (limits.read_bandwidth == 0) {
      limits.read_bandwidth = bandwidth_.measure(static_cast<int>(threads_));
      limits.peaks = multiply_peaks(static_cast<int>(threads_));
    }
    limits.disk_bandwidth = engine_->read_rate(probe_seconds);
    report_.add(limits);
  }

  void prefill_to(int64_t frontier) {
    Measurement m = begin("prefill");
    prefill(answers_.front(), frontier);
    m.sum = answers_.front().session->last();
    end(m);
  }

  static void prefill(const Answer& answer, int64_t frontier) {
    const int64_t here = answer.session->position();
    const auto tokens = static_cast<size_t>(frontier - here);
    const moeflux::Progress progress = [](int64_t, int64_t) { return !interrupted; };
    answer.session->prefill(std::span(answer.prompt).subspan(static_cast<size_t>(here), tokens), progress);
  }

  void probe(size_t sessions) {
    const moeflux::Session& first = *answers_.front().session;
    Measurement m = begin("decode");
    m.sessions = static_cast<int64_t>(sessions);
    if (streams_) m.disk_bandwidth = engine_->read_rate(probe_seconds);
    for (size_t i = 0; i < sessions; ++i) tokens_[i] = answers_[i].first;
    (void)step(sessions);
    m.choosing_seconds = choosing_seconds();
    if (sessions == 1)
      m.bytes_touched = arguments_.decode * (engine_->step_bytes() + state_bytes(*answers_.front().session));
    restart(m);
    for (int64_t i = 0; i < arguments_.decode; ++i) {
      for (size_t j = 0; j < sessions; ++j) tokens_[j] = answers_[j].next.after(*answers_[j].session);
      m.sum += step(sessions);
    }
    m.context = first.position() - arguments_.decode - 1;
    m.choosing_seconds = choosing_seconds() - m.choosing_seconds;
    end(m);
  }

  // Evaluates a token of each of the first so many sessions.
  moeflux::StepStats step(size_t sessions) {
    check_interrupt();
    for (size_t i = 0; i < sessions; ++i) {
      work_[i].session = answers_[i].session.get();
      work_[i].tokens = {&tokens_[i], 1};
    }
    if (sessions > 1) return engine_->evaluate(std::span(work_).first(sessions));
    answers_.front().session->step(tokens_.front());
    return answers_.front().session->last();
  }

  double choosing_seconds() const {
    double seconds = 0;
    for (const Answer& answer : answers_) seconds += answer.next.seconds();
    return seconds;
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
    if (!m.context) m.context = answers_.front().session->position();
    m.peak_rss_bytes = peak_rss_bytes() - bandwidth_.buffer_bytes();
    m.load = load_average();
    report_.add(m);
  }

  const Arguments& arguments_;
  int64_t threads_;
  const moeflux::ReadBandwidth& bandwidth_;
  Report& report_;
  std::shared_ptr<moeflux::Engine> engine_;
  std::vector<Answer> answers_;  // as many as decode together at most
  std::vector<int32_t> tokens_;  // of a step
  std::vector<moeflux::Work> work_;
  bool streams_ = false;  // fewer slots than experts
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
