#include "backend/timed_backend.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/stopwatch.h"

namespace moeflux {
namespace {

int64_t bytes_of(const Matrix& matrix) { return matrix.rows * matrix.format.row_bytes(matrix.columns); }

int64_t row_bytes(const Cache& cache) { return cache.block_bytes() / cache.rows(); }

int64_t numbers(const Heads& heads) { return heads.heads * heads.dim; }

bool same_place(const View& a, const View& b) { return a.buffer == b.buffer && a.offset == b.offset; }

// How many pairs of rows attention computes for n rows from `first` on, each with every row up to its own, or with the
// last so many of them.
int64_t meetings(int64_t first, int64_t n, int64_t window = 0) {
  const int64_t all = n * first + n * (n + 1) / 2;
  if (window == 0 || window >= first + n) return all;
  const int64_t begin = std::max(first, window);  // from there on, the window hides rows
  return all - meetings(begin - window, first + n - begin);
}

constexpr double least_seconds = 1e-9;  // of an op, so that rates are numbers

std::string shape_of(const OpTimes::Kind& kind) {
  if (kind.matrices == 0) return {};
  const std::string several = kind.matrices > 1 ? concat(" in ", kind.matrices) : "";
  return concat(kind.columns, " -> ", kind.rows, several, ", ", kind.format.describe());
}

}  // namespace

void OpTimes::add(const Kind& kind, const OpTime& what) {
  auto found = std::find_if(kinds_.begin(), kinds_.end(), [&](const auto& known) { return known.first == kind; });
  if (found == kinds_.end()) {
    OpTime fresh;
    fresh.op = kind.op;
    fresh.shape = shape_of(kind);
    found = kinds_.insert(found, {kind, std::move(fresh)});
  }
  OpTime& sum = found->second;
  ++sum.calls;
  sum.rows += what.rows;
  sum.seconds += what.seconds;
  sum.bytes += what.bytes;
  sum.products += what.products;
}

std::vector<OpTime> OpTimes::take() {
  std::vector<OpTime> taken;
  for (auto& [kind, time] : kinds_) {
    if (time.calls == 0) continue;
    taken.push_back(time);
    time.calls = time.rows = time.bytes = time.products = 0;
    time.seconds = 0;
  }
  return taken;
}

class TimedCommands final : public Commands {
 public:
  // With a `device`, each op is submitted by itself, and takes as long as its batch does less `nothing`, which is what
  // a batch takes that does next to nothing.
  TimedCommands(OpTimes& times, Backend* device, double nothing) : times_(times), device_(device), nothing_(nothing) {}

  void begin(std::unique_ptr<Commands> inner) {
    inner_ = std::move(inner);
    holds_ = is_marked_ = false;
  }
  std::unique_ptr<Commands> end() {
    if (is_marked_ && !holds_) inner_->mark();  // all of what came before is done
    return std::move(inner_);
  }

  void embed(const Matrix& table, View ids, View out, int64_t n) override {
    const int64_t row = table.format.row_bytes(table.columns) + table.columns * 4;
    timed({"embed"}, n, n * row, 0, [&] { inner_->embed(table, ids, out, n); });
  }
  void rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) override {
    moves("rms_norm", n, 2 * width, [&] { inner_->rms_norm(x, weight, out, n, width, eps); });
  }
  void rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) override {
    moves("rms_norm_heads", n, 2 * numbers(x), [&] { inner_->rms_norm_heads(x, weight, n, eps, scale); });
  }
  void layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) override {
    moves("layer_norm", n, 2 * width, [&] { inner_->layer_norm(x, weight, bias, n, width, eps); });
  }
  void gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) override {
    moves("gated_rms_norm", n, 3 * numbers(x), [&] { inner_->gated_rms_norm(x, z, weight, n, eps); });
  }
  void matmul(std::span<const Product> products, int64_t n) override {
    OpTimes::Kind kind = {"matmul", static_cast<int64_t>(products.size())};
    int64_t bytes = 0;
    int64_t multiplied = 0;
    const View* x = nullptr;
    for (const Product& product : products) {
      const Matrix& matrix = product.matrix;
      if (!x) kind.columns = matrix.columns, kind.format = matrix.format;
      kind.rows += matrix.rows;
      const int64_t in = product.transposed ? matrix.rows : matrix.columns;
      const int64_t out = matrix.rows + matrix.columns - in;
      bytes += bytes_of(matrix) + n * 4 * (out + (x && same_place(*x, product.x) ? 0 : in));
      multiplied += n * matrix.rows * matrix.columns;
      x = &product.x;
    }
    timed(kind, n, bytes, multiplied, [&] { inner_->matmul(products, n); });
  }
  void rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) override {
    moves("rope", n, 2 * half * (2 * x.heads + 1), [&] { inner_->rope(x, angles, half, interleaved, n); });
  }
  void append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) override {
    timed({"append"}, n, n * (cache.width * 4 + row_bytes(cache)), 0,
          [&] { inner_->append(x, x_stride, cache, first, n); });
  }
  void attention(const AttentionArgs& args, int64_t n) override {
    const int64_t before = args.window ? std::min(args.first_position, args.window - 1) : args.first_position;
    const int64_t cached = (before + n) * (row_bytes(args.k) + row_bytes(args.v));
    const int64_t met = meetings(args.first_position, n, args.window);
    timed({"attention"}, n, cached + n * 8 * numbers(args.q), 2 * met * numbers(args.q),
          [&] { inner_->attention(args, n); });
  }
  void mla_attention(const LatentAttentionArgs& args, int64_t n) override {
    const int64_t cached = (args.first_position + n) * (row_bytes(args.latent) + row_bytes(args.k_pe));
    const int64_t queries = numbers(args.q_latent) + numbers(args.q_pe);
    const int64_t outputs = numbers(args.q_latent);
    timed({"mla_attention"}, n, cached + n * 4 * (queries + outputs),
          meetings(args.first_position, n) * (queries + outputs), [&] { inner_->mla_attention(args, n); });
  }
  void index_scores(const IndexScoresArgs& args, int64_t n) override {
    int64_t seen = 0;
    for (int64_t i = 0; i < n; ++i) seen += units_seen(args.first_position + i, args.keys.unit);
    const int64_t keys = units_seen(args.first_position + n - 1, args.keys.unit) * row_bytes(args.keys);
    timed({"index_scores"}, n, keys + n * 4 * (numbers(args.q) + args.q.heads) + seen * 4, seen * numbers(args.q),
          [&] { inner_->index_scores(args, n); });
  }
  void index_select(const IndexSelectArgs& args, int64_t n) override {
    const int64_t seen = units_seen(args.first_position + n - 1, args.unit);
    moves("index_select", n, seen + args.count, [&] { inner_->index_select(args, n); });
  }
  void gather_rows(const GatherRowsArgs& args) override {
    const int64_t rows = selected_rows(args.position, args.unit, args.count);
    timed({"gather_rows"}, 1, 2 * rows * row_bytes(args.from), 0, [&] { inner_->gather_rows(args); });
  }
  void conv1d(const ConvArgs& args, int64_t n) override {
    const int64_t weights_and_state = (3 * args.taps - 2) * args.channels * 4;
    timed({"conv1d"}, n, weights_and_state + n * 8 * args.channels, 0, [&] { inner_->conv1d(args, n); });
  }
  void delta_gates(const DeltaGatesArgs& args, int64_t n) override {
    moves("delta_gates", n, 4 * args.heads, [&] { inner_->delta_gates(args, n); });
  }
  void gated_delta(const DeltaArgs& args, int64_t n) override {
    const int64_t state = numbers(args.v) * args.k.dim * 4;
    const int64_t row = numbers(args.q) + numbers(args.k) + 2 * numbers(args.v) + 2 * args.v.heads;
    timed({"gated_delta"}, n, 2 * state + n * 4 * row, 0, [&] { inner_->gated_delta(args, n); });
  }
  void route_softmax(const RouteArgs& args, int64_t n) override {
    moves("route_softmax", n, args.experts + 2 * args.k, [&] { inner_->route_softmax(args, n); });
  }
  void route_grouped(const RouteArgs& args, int64_t n) override {
    moves("route_grouped", n, 2 * args.experts + 2 * args.k, [&] { inner_->route_grouped(args, n); });
  }
  void expert_ffn(const ExpertArgs& args) override {
    OpTimes::Kind kind = {"expert_ffn", 3};
    int64_t bytes = 0;
    int64_t pairs = 0;
    for (const ExpertJob& job : args.jobs) {
      const ExpertMatrices& expert = job.expert;
      kind = {"expert_ffn", 3, args.hidden, 2 * args.intermediate + args.hidden, expert.gate.format};
      bytes += bytes_of(expert.gate) + bytes_of(expert.up) + bytes_of(expert.down);
      pairs += job.count;
    }
    timed(kind, pairs, bytes + pairs * 8 * args.hidden, 3 * pairs * args.hidden * args.intermediate,
          [&] { inner_->expert_ffn(args); });
  }
  // It is reported as expert_ffn, because it does not matter who knows the experts. Each pair counts as one expert.
  void chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) override {
    const ExpertMatrices& expert = args.first;
    const OpTimes::Kind kind = {"expert_ffn", 3, args.hidden, 2 * args.intermediate + args.hidden, expert.gate.format};
    const int64_t pairs = n * args.k;
    const int64_t bytes = bytes_of(expert.gate) + bytes_of(expert.up) + bytes_of(expert.down);
    timed(kind, pairs, pairs * (bytes + 8 * args.hidden), pairs * 3 * args.intermediate * args.hidden,
          [&] { inner_->chosen_expert_ffn(args, n); });
  }
  void swiglu(View gate, View up, View out, int64_t count) override {
    moves("swiglu", 1, 3 * count, [&] { inner_->swiglu(gate, up, out, count); });
  }
  void geglu(View gate, View up, View out, int64_t count) override {
    moves("geglu", 1, 3 * count, [&] { inner_->geglu(gate, up, out, count); });
  }
  void combine(const CombineArgs& args, int64_t n) override {
    const int64_t row = (args.k + 1 + (args.residual ? 1 : 0) + (args.shared ? 1 : 0)) * args.hidden;
    moves("combine", n, row, [&] { inner_->combine(args, n); });
  }
  void residual_add(View x, View y, View out, int64_t count) override {
    moves("residual_add", 1, 3 * count, [&] { inner_->residual_add(x, y, out, count); });
  }
  void bias_add(View x, View bias, int64_t n, int64_t width) override {
    moves("bias_add", n, 2 * width, [&] { inner_->bias_add(x, bias, n, width); });
  }
  void scale(View x, float factor, int64_t count) override {
    moves("scale", 1, 2 * count, [&] { inner_->scale(x, factor, count); });
  }
  void soft_cap(View x, float cap, int64_t count) override {
    moves("soft_cap", 1, 2 * count, [&] { inner_->soft_cap(x, cap, count); });
  }
  void silu(View x, float factor, int64_t count) override {
    moves("silu", 1, 2 * count, [&] { inner_->silu(x, factor, count); });
  }
  void hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) override {
    moves("hyper_norm", n, 2 * streams * width, [&] { inner_->hyper_norm(x, weight, out, n, streams, width, eps); });
  }
  void hyper_mix(const HyperMixArgs& args, int64_t n) override {
    moves("hyper_mix", n, (2 * args.streams + 1) * args.width, [&] { inner_->hyper_mix(args, n); });
  }
  void hyper_add(const HyperAddArgs& args, int64_t n) override {
    moves("hyper_add", n, (2 * args.streams + 1) * args.width, [&] { inner_->hyper_add(args, n); });
  }
  void ngram_gate(const NgramGateArgs& args, int64_t n) override {
    moves("ngram_gate", n, (3 * args.streams + 1) * args.width, [&] { inner_->ngram_gate(args, n); });
  }
  void sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) override {
    moves("sigmoid_gate", n, 3 * numbers(x), [&] { inner_->sigmoid_gate(x, gate, n); });
  }
  void top_k(View logits, int64_t count, int64_t k, View ids, View values) override {
    moves("top_k", 1, count + 2 * k, [&] { inner_->top_k(logits, count, k, ids, values); });
  }
  void survey(View logits, int64_t count, View found) override {
    moves("survey", 1, count + 2, [&] { inner_->survey(logits, count, found); });
  }
  void shortlist(std::span<const ShortlistArgs> rows, int64_t count) override {
    const auto number = static_cast<int64_t>(rows.size());
    moves("shortlist", number, number * count, [&] { inner_->shortlist(rows, count); });
  }
  void copy(View from, View to, int64_t bytes) override {
    timed({"copy"}, 1, 2 * bytes, 0, [&] { inner_->copy(from, to, bytes); });
  }
  void mark() override {
    if (device_ && !holds_) {
      is_marked_ = true;
    } else {
      inner_->mark();
    }
  }
  int64_t hold() override {
    if (is_marked_ && !holds_) inner_->mark();
    holds_ = true;
    return inner_->hold();
  }
  void after(const Ticket& copy) override { inner_->after(copy); }

 private:
  template <typename Run>
  void timed(const OpTimes::Kind& kind, int64_t rows, int64_t bytes, int64_t products, const Run& run) {
    if (holds_) return run();  // it begins when somebody says so, who cannot be waited for here
    const Stopwatch watch;
    run();
    if (device_) {
      device_->submit(std::move(inner_)).wait();
      inner_ = device_->begin();
    }
    OpTime what;
    what.seconds = std::max(watch.seconds() - nothing_, least_seconds);
    what.rows = rows;
    what.bytes = bytes;
    what.products = products;
    times_.add(kind, what);
  }

  // An op that does little with each number. There are `row` numbers of four bytes in each of n rows.
  template <typename Run>
  void moves(const char* op, int64_t n, int64_t row, const Run& run) {
    timed({op}, n, n * row * 4, 0, run);
  }

  OpTimes& times_;
  Backend* device_;  // null where ops run while they are recorded
  double nothing_;
  std::unique_ptr<Commands> inner_;
  bool holds_ = false;
  bool is_marked_ = false;  // and the mark is not recorded yet: it must lie in the last of the batches
};

namespace {

// The least of many, because anything that comes between makes one longer.
double seconds_of_nothing(Backend& device) {
  const auto from = device.allocate(16, Memory::device, "a clock");
  const auto to = device.allocate(16, Memory::device, "a clock");
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 64; ++i) {
    const Stopwatch watch;
    std::unique_ptr<Commands> commands = device.begin();
    commands->copy({from.get()}, {to.get()}, 16);
    device.submit(std::move(commands)).wait();
    least = std::min(least, watch.seconds());
  }
  return least;
}

}  // namespace

TimedBackend::TimedBackend(std::unique_ptr<Backend> inner, OpTimes& times)
    : inner_(std::move(inner)), times_(times), nothing_(inner_->runs_on_submit() ? seconds_of_nothing(*inner_) : 0) {}

TimedBackend::~TimedBackend() = default;

std::unique_ptr<Commands> TimedBackend::begin() {
  std::unique_ptr<TimedCommands> commands = std::move(spare_);
  if (!commands)
    commands = std::make_unique<TimedCommands>(times_, inner_->runs_on_submit() ? inner_.get() : nullptr, nothing_);
  commands->begin(inner_->begin());
  return commands;
}

Ticket TimedBackend::submit(std::unique_ptr<Commands> commands) {
  std::unique_ptr<TimedCommands> batch(static_cast<TimedCommands*>(commands.release()));
  std::unique_ptr<Commands> inner = batch->end();
  spare_ = std::move(batch);
  return inner_->submit(std::move(inner));
}

}  // namespace moeflux
