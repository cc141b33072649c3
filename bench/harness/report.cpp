#include "report.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <tuple>

#include "machine.h"

namespace bench {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else if (static_cast<unsigned char>(c) < 0x20)
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c)), out += escaped;
    else
      out += c;
  }
  return out + '"';
}

// Members of a JSON object, in the order they were added.
class Members {
 public:
  Members& add(const char* name, const std::string& json) {
    text_ += moeflux::concat(text_.empty() ? "" : ", ", '"', name, "\": ", json);
    return *this;
  }
  Members& add(const char* name, int64_t value) { return add(name, std::to_string(value)); }
  Members& add(const char* name, double value) { return add(name, number(value)); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// part / whole; null when there is no whole.
std::string share(double part, double whole) { return whole > 0 ? number(part / whole) : "null"; }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Measurements with the same key are repetitions.
using Key = std::tuple<int64_t, int64_t, int64_t, std::string>;
Key key_of(const Measurement& m) { return {m.threads, m.context, m.sessions, m.what}; }

struct Experts {
  double hits;
  double misses;
  double used;  // of what the look-ahead read
};

Experts experts_of(const Measurement& m) {
  return {static_cast<double>(m.sum.expert_hits), static_cast<double>(m.sum.expert_misses),
          static_cast<double>(m.sum.look_ahead_used)};
}

std::string fixed(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::string percent(double part, double whole) {
  char text[16] = "";
  if (whole > 0) std::snprintf(text, sizeof text, "%.0f%%", 100 * part / whole);
  return text;
}

}  // namespace

Report::Report(const Arguments& arguments) : arguments_(arguments), to_stdout_(arguments.json == "-") {
  if (to_stdout_) return;
  file_.open(arguments.json, std::ios::trunc);
  if (!file_)
    throw ArgumentError(moeflux::concat("--json: expected a file that can be written, found ", quoted(arguments.json)));
}

void Report::set_constant(const moeflux::Engine& engine) {
  Members machine;
  machine.add("cpu", quoted(cpu_name())).add("cores", int64_t{cores()});
  Members members;
  members.add("isa", quoted(engine.isa()))
      .add("precision", quoted(std::string(moeflux::name_of(arguments_.precision))))
      .add("sampling", quoted(arguments_.sampling_text))
      .add("kv", quoted(arguments_.kv_name))
      .add("engine", quoted(engine.describe()))
      .add("variant", quoted(engine.variant().name))
      .add("store", quoted(arguments_.store))
      .add("commit", quoted(moeflux::commit))
      .add("compiler", quoted(compiler()))
      .add("machine", "{" + machine.text() + "}");
  constant_ = members.text();
  isa_ = engine.isa();
  std::fprintf(stderr, "%s\n%s\n", engine.variant().name.c_str(), engine.describe().c_str());
}

void Report::begin(const moeflux::Engine& engine) {
  set_constant(engine);
  std::fprintf(stderr, "%-8s %8s %7s %8s %4s %7s %9s %9s %6s %8s %8s %6s %6s %7s %7s %7s\n", "what", "context",
               "threads", "sessions", "rep", "tokens", "seconds", "tokens/s", "wait", "MB read", "MB disk", "hits",
               "recall", "of disk", "of read", "allocs");
}

// ---- Counts -------------------------------------------------------------------------------------------------------

void Report::begin_counts(const moeflux::Engine& engine) {
  set_constant(engine);
  std::fprintf(stderr, "%-8s %8s %7s %s a token\n", "what", "context", "tokens",
               arguments_.count == "calls" ? "system calls" : "instructions");
}

void Report::add(const Count& c) {
  Members members;
  members.add("what", quoted("count"))
      .add("of", quoted(c.of))
      .add("context", c.context)
      .add("tokens", c.tokens)
      .add(arguments_.count == "calls" ? "system_calls" : "instructions", c.count);
  write_line("{" + members.text() + ", " + constant_ + "}");
  std::fprintf(stderr, "%-8s %8lld %7lld %.2f\n", c.of, static_cast<long long>(c.context),
               static_cast<long long>(c.tokens), static_cast<double>(c.count) / static_cast<double>(c.tokens));
}

// ---- Limits and ops -----------------------------------------------------------------------------------------------

void Report::add(const Limits& limits) {
  limits_[limits.threads] = limits;
  Members peaks;
  std::string words;
  for (const Peak& peak : limits.peaks) {
    peaks.add(peak.isa.c_str(), peak.multiplications);
    words += moeflux::concat(", ", peak.isa, " ", fixed(peak.multiplications / 1e9), " G ", peak.type);
  }
  Members members;
  members.add("what", quoted("limits"))
      .add("threads", limits.threads)
      .add("read_bandwidth", limits.read_bandwidth)
      .add("multiply_adds", "{" + peaks.text() + "}")
      .add("disk_bandwidth", limits.disk_bandwidth);
  write_line("{" + members.text() + ", " + constant_ + "}");
  std::fprintf(stderr, "limits: memory %.1f GB/s, disk %.2f GB/s; multiply-adds a second%s\n",
               limits.read_bandwidth / 1e9, limits.disk_bandwidth / 1e9, words.c_str());
}

double Report::peak(const Limits& limits) const {
  for (const Peak& peak : limits.peaks)
    if (peak.isa == isa_) return peak.multiplications;
  return 0;
}

double Report::shortest(const moeflux::OpTime& op, const Limits& limits) const {
  const double moving = static_cast<double>(op.bytes) / limits.read_bandwidth;
  const double most = peak(limits);
  return most > 0 ? std::max(moving, static_cast<double>(op.products) / most) : moving;
}

std::string Report::json(const moeflux::OpTime& op, const Measurement& m) const {
  const Limits& limits = limits_.at(m.threads);
  const double bytes_a_second = static_cast<double>(op.bytes) / op.seconds;
  const double products_a_second = static_cast<double>(op.products) / op.seconds;
  Members members;
  members.add("what", quoted("op"))
      .add("of", quoted(m.what))
      .add("op", quoted(op.op))
      .add("shape", quoted(op.shape))
      .add("context", m.context)
      .add("tokens", m.sum.tokens)
      .add("calls", op.calls)
      .add("rows", op.rows)
      .add("seconds", op.seconds)
      .add("bytes", op.bytes)
      .add("bytes_per_second", bytes_a_second)
      .add("share_of_read_bandwidth", bytes_a_second / limits.read_bandwidth)
      .add("products", op.products)
      .add("products_per_second", products_a_second)
      .add("share_of_peak", share(products_a_second, peak(limits)))
      .add("share_of_roofline", shortest(op, limits) / op.seconds)
      .add("rep", m.rep)
      .add("sessions", m.sessions)
      .add("threads", m.threads);
  return "{" + members.text() + ", " + constant_ + "}";
}

// The ops of all warm walks together, the longest first.
void Report::op_tables() const {
  struct Sum {
    double seconds = 0;
    int64_t tokens = 0;
    std::map<std::pair<std::string, std::string>, moeflux::OpTime> ops;
  };
  std::map<Key, Sum> sums;
  for (const Measurement& m : all_) {
    if (m.rep == 0 || m.ops.empty()) continue;
    Sum& sum = sums[key_of(m)];
    sum.seconds += m.seconds;
    sum.tokens += m.sum.tokens;
    for (const moeflux::OpTime& op : m.ops) {
      moeflux::OpTime& all = sum.ops.try_emplace({op.op, op.shape}).first->second;
      all.op = op.op;
      all.shape = op.shape;
      all.calls += op.calls;
      all.seconds += op.seconds;
      all.bytes += op.bytes;
      all.products += op.products;
    }
  }
  for (const auto& [key, sum] : sums) {
    const auto& [threads, context, sessions, what] = key;
    const Limits& limits = limits_.at(threads);
    std::vector<moeflux::OpTime> ops;
    for (const auto& [name, op] : sum.ops) ops.push_back(op);
    std::sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
    std::fprintf(stderr, "%s at %lld, %lld threads, %lld sessions\n%-15s %-34s %6s %9s %6s %7s %8s %8s %8s\n",
                 what.c_str(), static_cast<long long>(context), static_cast<long long>(threads),
                 static_cast<long long>(sessions), "op", "", "calls", "us/token", "share", "GB/s", "of read", "GMAC/s",
                 "roofline");
    double rest = sum.seconds;
    for (const moeflux::OpTime& op : ops) {
      rest -= op.seconds;
      std::fprintf(stderr, "%-15s %-34s %6lld %9.1f %5.1f%% %7.2f %7.0f%% %8.1f %7.0f%%\n", op.op.c_str(),
                   op.shape.c_str(), static_cast<long long>(op.calls),
                   1e6 * op.seconds / static_cast<double>(sum.tokens), 100 * op.seconds / sum.seconds,
                   static_cast<double>(op.bytes) / op.seconds / 1e9,
                   100 * static_cast<double>(op.bytes) / op.seconds / limits.read_bandwidth,
                   static_cast<double>(op.products) / op.seconds / 1e9, 100 * shortest(op, limits) / op.seconds);
    }
    std::fprintf(stderr, "%-15s %-34s %6s %9.1f %5.1f%%\n", "between ops", "", "",
                 1e6 * rest / static_cast<double>(sum.tokens), 100 * rest / sum.seconds);
  }
}

// ---- Measurements -------------------------------------------------------------------------------------------------

std::string Report::json(const Measurement& m) const {
  const Experts experts = experts_of(m);
  Members members;
  members.add("what", quoted(m.what))
      .add("context", m.context)
      .add("tokens", m.sum.tokens)
      .add("seconds", m.seconds)
      .add("cpu_seconds", m.cpu_seconds)
      .add("tokens_per_second", m.tokens_per_second())
      .add("compute_seconds", m.sum.compute_seconds)
      .add("choosing_seconds", m.is_decode() ? number(m.choosing_seconds) : "null")
      .add("router_seconds", m.sum.router_seconds)
      .add("beside_seconds", m.sum.beside_seconds)
      .add("arrived_seconds", m.sum.arrived_seconds)
      .add("read_wait_seconds", m.sum.read_wait_seconds)
      .add("bytes_read", m.sum.bytes_read)
      .add("expert_hits", m.sum.expert_hits)
      .add("expert_misses", m.sum.expert_misses)
      .add("host_hits", m.sum.host_hits)
      .add("bytes_copied", m.sum.bytes_copied)
      .add("hit_rate", share(experts.hits, experts.hits + experts.misses))
      .add("wait_share", share(m.sum.read_wait_seconds, m.seconds))
      .add("read_busy_seconds", m.sum.read_busy_seconds)
      .add("disk_bytes", m.disk_bytes >= 0 ? std::to_string(m.disk_bytes) : "null")
      .add("disk_bandwidth", m.disk_bandwidth > 0 ? number(m.disk_bandwidth) : "null")
      .add("share_of_disk_bandwidth", share(static_cast<double>(m.sum.bytes_read) / m.seconds, m.disk_bandwidth))
      .add("over_the_bound", m.disk_bandwidth > 0 ? number(m.over_the_bound()) : "null")
      .add("look_ahead_reads", m.sum.look_ahead_reads)
      .add("look_ahead_used", m.sum.look_ahead_used)
      .add("look_ahead_wasted_bytes", m.sum.look_ahead_wasted_bytes)
      .add("drafted", m.sum.drafted)
      .add("accepted", m.sum.accepted)
      .add("look_ahead_recall", share(experts.used, experts.used + experts.misses))
      .add("look_ahead_precision", share(experts.used, static_cast<double>(m.sum.look_ahead_reads)))
      .add("submissions", m.sum.submissions)
      .add("waits", m.sum.waits)
      .add("allocations", m.allocations)
      .add("peak_rss_bytes", m.peak_rss_bytes)
      .add("read_bandwidth", m.read_bandwidth)
      .add("bytes_touched", m.bytes_touched ? std::to_string(m.bytes_touched) : "null")
      .add("share_of_read_bandwidth", m.bytes_touched ? number(m.share()) : "null")
      .add("rep", m.rep)
      .add("load", m.load)
      .add("sessions", m.sessions)
      .add("threads", m.threads);
  return "{" + members.text() + ", " + constant_ + "}";
}

// Each line is written at once, so that whoever stops us keeps what is done.
void Report::write_line(const std::string& line) {
  std::ostream& out = to_stdout_ ? std::cout : file_;
  out << line << std::endl;
  if (!out) throw moeflux::IoError(moeflux::concat("--json ", quoted(arguments_.json), ": a line cannot be written"));
}

void Report::add(const Measurement& m) {
  all_.push_back(m);
  write_line(json(m));
  for (const moeflux::OpTime& op : m.ops) write_line(json(op, m));
  const Experts experts = experts_of(m);
  const double looked_ahead = m.sum.look_ahead_reads > 0 ? experts.used + experts.misses : 0;
  std::fprintf(
      stderr, "%-8s %8lld %7lld %8lld %4lld %7lld %9.4f %9.2f %6s %8.1f %8s %6s %6s %7s %7s %7lld\n", m.what,
      static_cast<long long>(m.context), static_cast<long long>(m.threads), static_cast<long long>(m.sessions),
      static_cast<long long>(m.rep), static_cast<long long>(m.sum.tokens), m.seconds, m.tokens_per_second(),
      percent(m.sum.read_wait_seconds, m.seconds).c_str(), static_cast<double>(m.sum.bytes_read) / 1e6,
      m.disk_bytes >= 0 ? fixed(static_cast<double>(m.disk_bytes) / 1e6).c_str() : "",
      percent(experts.hits, experts.hits + experts.misses).c_str(), percent(experts.used, looked_ahead).c_str(),
      percent(static_cast<double>(m.sum.bytes_read) / m.seconds, m.disk_bandwidth).c_str(),
      percent(m.bytes_touched ? m.share() : 0, m.bytes_touched ? 1 : 0).c_str(), static_cast<long long>(m.allocations));
}

void Report::end() const {
  std::map<Key, std::vector<double>> speeds;
  std::map<Key, std::vector<double>> shares;
  std::map<Key, std::vector<double>> bounds;
  std::map<Key, std::vector<double>> choices;
  for (const Measurement& m : all_) {
    if (m.rep == 0) continue;
    speeds[key_of(m)].push_back(m.tokens_per_second());
    if (m.bytes_touched) shares[key_of(m)].push_back(100 * m.share());
    if (m.is_decode()) choices[key_of(m)].push_back(1000 * m.choosing_seconds / static_cast<double>(m.sum.tokens));
    if (m.disk_bandwidth > 0) bounds[key_of(m)].push_back(m.over_the_bound());
  }
  if (speeds.empty()) return;
  std::fprintf(stderr, "medians of the warm walks\n");
  for (const auto& [key, values] : speeds) {
    const auto& [threads, context, sessions, what] = key;
    std::fprintf(stderr, "%-8s %8lld %7lld threads %4lld sessions %10.2f tokens/s", what.c_str(),
                 static_cast<long long>(context), static_cast<long long>(threads), static_cast<long long>(sessions),
                 median(values));
    if (const auto share = shares.find(key); share != shares.end())
      std::fprintf(stderr, ", %.0f%% of the read bandwidth", median(share->second));
    if (const auto bound = bounds.find(key); bound != bounds.end())
      std::fprintf(stderr, ", %.2f x the slower of disk and processor", median(bound->second));
    if (const auto choice = choices.find(key); choice != choices.end())
      std::fprintf(stderr, ", %.3f ms a token to choose it", median(choice->second));
    std::fprintf(stderr, "\n");
  }
  op_tables();
}

}  // namespace bench
