#include "count.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>

#include "model.h"
#include "next_token.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#endif

#if defined(__linux__)

namespace {

std::atomic<int64_t> counted_clock{0};  // nanoseconds; 0: time is that of the system

}  // namespace

// Reading the system's clock begins again whenever the clock has moved on meanwhile. While the reader is stopped after
// every instruction, that happens over and over. So in the counted process each look at the clock is a microsecond
// after the one before.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (counted_clock.load(std::memory_order_relaxed) == 0) {
    static const auto of_the_system =
        reinterpret_cast<int (*)(clockid_t, timespec*)>(dlsym(RTLD_NEXT, "clock_gettime"));
    return of_the_system(clock, time);
  }
  const int64_t now = counted_clock.fetch_add(1000, std::memory_order_relaxed);
  *time = {static_cast<time_t>(now / 1'000'000'000), static_cast<long>(now % 1'000'000'000)};
  return 0;
}

#endif

namespace bench {

#if defined(__linux__)

namespace {

// What is counted, in this order. The first part does nothing, to count what stopping itself takes.
enum Part { nothing, prefill, decode, parts };
using Counts = std::array<int64_t, parts>;

[[noreturn]] void fail(const char* what) {
  throw moeflux::StateError(moeflux::concat("--count: ", what, ": ", std::strerror(errno)));
}

// The parent hears of it and counts from there to the next.
void mark() { raise(SIGSTOP); }

using Work = std::function<void()>;

void counted(const Work& part) {
  mark();
  part();
  mark();
}

// `run` is given the parts of the work that count, one after another.
void work(const Arguments& arguments, const std::function<void(const Work&)>& run) {
  Arguments resident = arguments;
  resident.slots = 0;
  resident.look_ahead = moeflux::LookAhead::off;  // it would read experts that were not picked yet
  const auto engine = moeflux::Engine::open(resident.store, engine_options(resident, 1));
  const auto session = engine->session(session_options(resident, engine->variant()));
  const auto prompt = prompt_of(resident.frontiers.front(), engine->variant().vocab_size);
  NextToken next(resident, engine->variant().vocab_size);
  const auto steps = [&] {
    for (int64_t i = 0; i < resident.decode; ++i) session->step(next.after(*session));
  };
  session->prefill(prompt);  // reads the experts that the same tokens will pick again
  steps();
  session->clear();
  run([] {});
  run([&] { session->prefill(prompt); });
  run(steps);
}

[[noreturn]] void child(const Arguments& arguments) {
  int status = 1;
  counted_clock = 1'000'000'000;
  try {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) fail("a process cannot be watched here");
    mark();
    work(arguments, counted);
    status = 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "moeflux-bench: %s\n", error.what());
  }
  _exit(status);
}

class Watched {
 public:
  explicit Watched(pid_t process) : process_(process) { wait(); }
  ~Watched() {
    if (ended_) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }

  void trace(long options) {
    if (ptrace(PTRACE_SETOPTIONS, process_, nullptr, options) != 0) fail("a process cannot be watched here");
  }

  // Goes on to the next mark in the way that `request` says. Returns how often it was stopped before that.
  int64_t run(decltype(PTRACE_CONT) request) {
    for (int64_t stops = 0;; ++stops) {
      if (ptrace(request, process_, nullptr, nullptr) != 0) fail("the counted process cannot go on");
      wait();
      if (WSTOPSIG(status_) == SIGSTOP) return stops;
      if ((WSTOPSIG(status_) & 0x7f) != SIGTRAP)
        throw moeflux::StateError(moeflux::concat("--count: the counted process got signal ", WSTOPSIG(status_)));
    }
  }

  void finish() {
    if (ptrace(PTRACE_CONT, process_, nullptr, nullptr) != 0) fail("the counted process cannot go on");
    if (waitpid(process_, &status_, 0) != process_) fail("the counted process is gone");
    ended_ = true;
  }

 private:
  void wait() {
    if (waitpid(process_, &status_, 0) != process_) fail("the counted process is gone");
    ended_ = WIFEXITED(status_) || WIFSIGNALED(status_);
    if (ended_) throw moeflux::StateError("--count: the counted process ended early");
  }

  pid_t process_;
  int status_ = 0;
  bool ended_ = false;
};

// While it lives, this process and the children that it makes stay on the core where it is, if the system lets them.
class OnOneCore {
 public:
  OnOneCore() {
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(static_cast<size_t>(sched_getcpu()), &here);
    moved_ = sched_getaffinity(0, sizeof before_, &before_) == 0 && sched_setaffinity(0, sizeof here, &here) == 0;
  }
  ~OnOneCore() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }
  OnOneCore(const OnOneCore&) = delete;

 private:
  cpu_set_t before_;
  bool moved_;
};

Counts stops(const Arguments& arguments, decltype(PTRACE_CONT) request) {
  // The process that counts and the one that is counted take turns. On two cores each turn takes four times as long.
  const OnOneCore core;
  const pid_t process = fork();
  if (process < 0) fail("no process can be made");
  if (process == 0) child(arguments);
  Watched watched(process);
  watched.trace(PTRACE_O_EXITKILL | PTRACE_O_TRACESYSGOOD);
  Counts counts = {};
  for (int64_t& count : counts) {
    watched.run(PTRACE_CONT);
    count = watched.run(request);
  }
  watched.finish();
  counts[prefill] -= counts[nothing];
  counts[decode] -= counts[nothing];
  return counts;
}

}  // namespace

void count(const Arguments& arguments, Report& report) {
  if (arguments.count == "nothing") {
    work(arguments, [](const Work& part) { part(); });
    return;
  }
  const bool calls = arguments.count == "calls";  // the child stops at the begin and at the end of each
  const Counts counts = stops(arguments, calls ? PTRACE_SYSCALL : PTRACE_SINGLESTEP);
  const int64_t stops_each = calls ? 2 : 1;
  const int64_t tokens = arguments.frontiers.front();
  // The engine is opened only here, because a child of a process with threads would not have them.
  const auto engine = moeflux::Engine::open(arguments.store, engine_options(arguments, 1));
  report.begin_counts(*engine);
  report.add(Count{"prefill", tokens, tokens, counts[prefill] / stops_each});
  if (arguments.decode) report.add(Count{"decode", tokens, arguments.decode, counts[decode] / stops_each});
}

#else

void count(const Arguments&, Report&) {
  throw ArgumentError("--count: expected Linux, where a process can be stopped at every instruction, found another");
}

#endif

}  // namespace bench
