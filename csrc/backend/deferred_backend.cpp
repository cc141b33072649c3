#include "backend/deferred_backend.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/error.h"

namespace moeflux {
namespace {

using Op = std::function<void(Commands&)>;

}  // namespace

struct DeferredBackend::Batch {
  int64_t number = 0;  // from 1
  std::vector<Op> ops;
  bool done = false;
  std::exception_ptr error;
};

// What the thread and the tickets share. It lives as long as the last of them.
struct DeferredBackend::Queue {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable ended;
  std::condition_variable let_go;
  std::deque<std::shared_ptr<Batch>> batches;
  int64_t submitted = 0;
  int64_t awaited = 0;   // the highest number that somebody has waited for
  int64_t holds = 0;     // how many were recorded
  int64_t released = 0;  // all up to this one were released
  bool closing = false;

  bool may_run() const {
    if (batches.empty()) return false;
    const int64_t number = batches.front()->number;
    return closing || number <= awaited || number % 3 == 0;
  }

  void hold(int64_t number) {
    std::unique_lock lock(mutex);
    let_go.wait(lock, [&] { return closing || released >= number; });
  }
};

// A copy outside of the batches, made as late as possible: when somebody waits for it, or a batch that comes after it.
class DeferredBackend::Move {
 public:
  explicit Move(std::function<void()> move) : move_(std::move(move)) {}

  // Makes it, once. Returns what went wrong.
  std::exception_ptr run() {
    const std::lock_guard lock(mutex_);
    if (const std::function<void()> move = std::exchange(move_, nullptr)) {
      try {
        move();
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    return error_;
  }
  bool done() {
    const std::lock_guard lock(mutex_);
    return !move_;
  }

 private:
  std::mutex mutex_;
  std::function<void()> move_;
  std::exception_ptr error_;
};

class DeferredBackend::Transfer final : public Ticket::State {
 public:
  explicit Transfer(std::shared_ptr<Move> move) : move_(std::move(move)) {}

  void wait() override {
    if (const std::exception_ptr error = move_->run()) std::rethrow_exception(error);
  }
  bool done() const override { return move_->done(); }
  const std::shared_ptr<Move>& move() const { return move_; }

 private:
  std::shared_ptr<Move> move_;
};

// Arguments that are borrowed for the call are copied. Views, matrices and caches are not: their memory must stay.
class DeferredCommands final : public Commands {
 public:
  explicit DeferredCommands(std::shared_ptr<DeferredBackend::Queue> queue) : queue_(std::move(queue)) {}

  std::vector<Op> take() { return std::move(ops_); }

  void embed(const Matrix& table, View ids, View out, int64_t n) override {
    later(
        [=, table = inside(table), ids = inside(ids), out = inside(out)](Commands& c) { c.embed(table, ids, out, n); });
  }
  void rms_norm(View x, View weight, View out, int64_t n, int64_t width, float eps) override {
    later([=, x = inside(x), weight = inside(weight), out = inside(out)](Commands& c) {
      c.rms_norm(x, weight, out, n, width, eps);
    });
  }
  void rms_norm_heads(const Heads& x, View weight, int64_t n, float eps, float scale) override {
    later([=, x = inside(x), weight = inside(weight)](Commands& c) { c.rms_norm_heads(x, weight, n, eps, scale); });
  }
  void layer_norm(View x, View weight, View bias, int64_t n, int64_t width, float eps) override {
    later([=, x = inside(x), weight = inside(weight), bias = inside(bias)](Commands& c) {
      c.layer_norm(x, weight, bias, n, width, eps);
    });
  }
  void gated_rms_norm(const Heads& x, const Heads& z, View weight, int64_t n, float eps) override {
    later([=, x = inside(x), z = inside(z), weight = inside(weight)](Commands& c) {
      c.gated_rms_norm(x, z, weight, n, eps);
    });
  }
  void matmul(std::span<const Product> products, int64_t n) override {
    std::vector<Product> own;
    for (const Product& product : products) own.push_back(inside(product));
    later([own = std::move(own), n](Commands& c) { c.matmul(own, n); });
  }
  void rope(const Heads& x, View angles, int64_t half, bool interleaved, int64_t n) override {
    later([=, x = inside(x), angles = inside(angles)](Commands& c) { c.rope(x, angles, half, interleaved, n); });
  }
  void append(View x, int64_t x_stride, const Cache& cache, int64_t first, int64_t n) override {
    later([=, x = inside(x), blocks = inside(cache.blocks)](Commands& c) {
      Cache own = cache;
      own.blocks = blocks;
      c.append(x, x_stride, own, first, n);
    });
  }
  void attention(const AttentionArgs& args, int64_t n) override {
    later([=, args = inside(args), blocks = inside(args.k.blocks)](Commands& c) {
      AttentionArgs own = args;
      own.k.blocks = own.v.blocks = blocks;
      c.attention(own, n);
    });
  }
  void mla_attention(const LatentAttentionArgs& args, int64_t n) override {
    later([=, args = inside(args), blocks = inside(args.latent.blocks)](Commands& c) {
      LatentAttentionArgs own = args;
      own.latent.blocks = own.k_pe.blocks = blocks;
      c.mla_attention(own, n);
    });
  }
  void index_scores(const IndexScoresArgs& args, int64_t n) override {
    later([=, args = inside(args), blocks = inside(args.keys.blocks)](Commands& c) {
      IndexScoresArgs own = args;
      own.keys.blocks = blocks;
      c.index_scores(own, n);
    });
  }
  void index_select(const IndexSelectArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.index_select(args, n); });
  }
  void gather_rows(const GatherRowsArgs& args) override {
    later([args = inside(args), from = inside(args.from.blocks), to = inside(args.to.blocks)](Commands& c) {
      GatherRowsArgs own = args;
      own.from.blocks = from;
      own.to.blocks = to;
      c.gather_rows(own);
    });
  }
  void conv1d(const ConvArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.conv1d(args, n); });
  }
  void delta_gates(const DeltaGatesArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.delta_gates(args, n); });
  }
  void gated_delta(const DeltaArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.gated_delta(args, n); });
  }
  void route_softmax(const RouteArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.route_softmax(args, n); });
  }
  void route_grouped(const RouteArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.route_grouped(args, n); });
  }
  void expert_ffn(const ExpertArgs& args) override {
    std::vector<std::vector<int32_t>> pairs;
    std::vector<ExpertJob> jobs;
    for (const ExpertJob& job : args.jobs) {
      pairs.emplace_back(job.pairs, job.pairs + job.count);
      jobs.push_back({inside(job.expert), nullptr, job.count, job.index});
    }
    later([args = inside(args), jobs = std::move(jobs), pairs = std::move(pairs)](Commands& c) {
      std::vector<ExpertJob> own = jobs;
      for (size_t i = 0; i < own.size(); ++i) own[i].pairs = pairs[i].data();
      ExpertArgs with_own = args;
      with_own.jobs = own;
      c.expert_ffn(with_own);
    });
  }
  void chosen_expert_ffn(const ChosenExpertArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.chosen_expert_ffn(args, n); });
  }
  void swiglu(View gate, View up, View out, int64_t count) override {
    later(
        [=, gate = inside(gate), up = inside(up), out = inside(out)](Commands& c) { c.swiglu(gate, up, out, count); });
  }
  void geglu(View gate, View up, View out, int64_t count) override {
    later([=, gate = inside(gate), up = inside(up), out = inside(out)](Commands& c) { c.geglu(gate, up, out, count); });
  }
  void combine(const CombineArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.combine(args, n); });
  }
  void residual_add(View x, View y, View out, int64_t count) override {
    later([=, x = inside(x), y = inside(y), out = inside(out)](Commands& c) { c.residual_add(x, y, out, count); });
  }
  void bias_add(View x, View bias, int64_t n, int64_t width) override {
    later([=, x = inside(x), bias = inside(bias)](Commands& c) { c.bias_add(x, bias, n, width); });
  }
  void scale(View x, float factor, int64_t count) override {
    later([=, x = inside(x)](Commands& c) { c.scale(x, factor, count); });
  }
  void soft_cap(View x, float cap, int64_t count) override {
    later([=, x = inside(x)](Commands& c) { c.soft_cap(x, cap, count); });
  }
  void silu(View x, float factor, int64_t count) override {
    later([=, x = inside(x)](Commands& c) { c.silu(x, factor, count); });
  }
  void hyper_norm(View x, View weight, View out, int64_t n, int64_t streams, int64_t width, float eps) override {
    later([=, x = inside(x), weight = inside(weight), out = inside(out)](Commands& c) {
      c.hyper_norm(x, weight, out, n, streams, width, eps);
    });
  }
  void hyper_mix(const HyperMixArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.hyper_mix(args, n); });
  }
  void hyper_add(const HyperAddArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.hyper_add(args, n); });
  }
  void ngram_gate(const NgramGateArgs& args, int64_t n) override {
    later([=, args = inside(args)](Commands& c) { c.ngram_gate(args, n); });
  }
  void sigmoid_gate(const Heads& x, const Heads& gate, int64_t n) override {
    later([=, x = inside(x), gate = inside(gate)](Commands& c) { c.sigmoid_gate(x, gate, n); });
  }
  void top_k(View logits, int64_t count, int64_t k, View ids, View values) override {
    later([=, logits = inside(logits), ids = inside(ids), values = inside(values)](Commands& c) {
      c.top_k(logits, count, k, ids, values);
    });
  }
  void survey(View logits, int64_t count, View found) override {
    later([=, logits = inside(logits), found = inside(found)](Commands& c) { c.survey(logits, count, found); });
  }
  void shortlist(std::span<const ShortlistArgs> rows, int64_t count) override {
    std::vector<ShortlistArgs> inside_rows(rows.begin(), rows.end());
    for (ShortlistArgs& row : inside_rows) row = {inside(row.logits), inside(row.head), inside(row.list), row.factor};
    later([rows = std::move(inside_rows), count](Commands& c) { c.shortlist(rows, count); });
  }
  void copy(View from, View to, int64_t bytes) override {
    later([=, from = inside_any(from, bytes), to = inside_any(to, bytes)](Commands& c) { c.copy(from, to, bytes); });
  }
  int64_t hold() override {
    int64_t number = 0;
    {
      const std::lock_guard lock(queue_->mutex);
      number = ++queue_->holds;
    }
    later([queue = queue_, number](Commands&) { queue->hold(number); });
    return number;
  }
  void after(const Ticket& copy) override {
    if (const auto* transfer = dynamic_cast<const DeferredBackend::Transfer*>(copy.state()))
      later([move = transfer->move()](Commands&) { move->run(); });
    else if (copy.state())
      static_cast<void>(error_of(*copy.state()));  // of the inner backend, which is not told of this batch yet
  }

 private:
  void later(Op op) { ops_.push_back(std::move(op)); }
  static std::exception_ptr error_of(Ticket::State& copy) {
    try {
      copy.wait();
    } catch (...) {
      return std::current_exception();
    }
    return {};
  }

  std::shared_ptr<DeferredBackend::Queue> queue_;
  std::vector<Op> ops_;
};

class DeferredBackend::Completion final : public Ticket::State {
 public:
  Completion(std::shared_ptr<Queue> queue, std::shared_ptr<Batch> batch)
      : queue_(std::move(queue)), batch_(std::move(batch)) {}

  void wait() override {
    std::unique_lock lock(queue_->mutex);
    queue_->awaited = std::max(queue_->awaited, batch_->number);
    queue_->work.notify_all();
    queue_->ended.wait(lock, [this] { return batch_->done; });
    if (batch_->error) std::rethrow_exception(batch_->error);
  }

  bool done() const override {
    const std::lock_guard lock(queue_->mutex);
    return batch_->done;
  }

 private:
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Batch> batch_;
};

DeferredBackend::DeferredBackend(std::unique_ptr<Backend> inner, bool apart, int64_t fail_at_copy)
    : inner_(std::move(inner)), apart_(apart), fail_at_copy_(fail_at_copy), queue_(std::make_shared<Queue>()) {
  thread_.start([this] { run(); });
}

DeferredBackend::~DeferredBackend() {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closing = true;
  }
  queue_->work.notify_all();
  queue_->let_go.notify_all();
  thread_.join();
}

std::unique_ptr<Buffer> DeferredBackend::allocate(int64_t bytes, Memory memory, const std::string& what) {
  std::unique_ptr<Buffer> buffer = inner_->allocate(bytes, memory, what);
  if (!apart_) return buffer;
  const int64_t there = memory == Memory::device ? arena_bytes(bytes) : 0;
  *held_there_ += there;
  const std::shared_ptr<const void> kept(nullptr, [held = held_there_, there](const void*) { *held -= there; });
  return apart_buffer(std::move(buffer), memory, what, kept);
}

int64_t DeferredBackend::prepare(const WorkSizes& sizes) {
  const int64_t bytes = inner_->prepare(sizes);
  *held_there_ += bytes;
  return bytes;
}

std::unique_ptr<Commands> DeferredBackend::begin() { return std::make_unique<DeferredCommands>(queue_); }

void DeferredBackend::release(int64_t number) {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->released = std::max(queue_->released, number);
  }
  queue_->let_go.notify_all();
}

Ticket DeferredBackend::submit(std::unique_ptr<Commands> commands) {
  auto batch = std::make_shared<Batch>();
  batch->ops = static_cast<DeferredCommands&>(*commands).take();
  if (batch->ops.empty()) return {};  // as Metal's: it waits for nothing, not for those before it either
  auto completion = std::make_unique<Completion>(queue_, batch);
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->batches.push_back(batch);
    batch->number = ++queue_->submitted;
  }
  queue_->work.notify_all();
  return Ticket(std::move(completion));
}

Ticket DeferredBackend::copy_all(std::span<const CopyArgs> copies) {
  if (!apart_) return inner_->copy_all(copies);
  std::vector<CopyArgs> own;
  for (const auto& [from, to, bytes] : copies) own.push_back({inside_any(from, bytes), inside_any(to, bytes), bytes});
  return transfer([this, own = std::move(own)] { inner_->copy_all(own).wait(); });
}

Ticket DeferredBackend::clear(View to, int64_t bytes) {
  if (!apart_) return inner_->clear(to, bytes);
  return transfer([this, to = inside_any(to, bytes), bytes] { inner_->clear(to, bytes).wait(); });
}

Ticket DeferredBackend::complete(View state, int64_t heads) {
  if (!apart_ || !delta_room()) return inner_->complete(state, heads);
  return transfer([this, state = inside(state), heads] { inner_->complete(state, heads).wait(); });
}

Ticket DeferredBackend::transfer(std::function<void()> move) {
  const int64_t number = copies_++;
  if (number == fail_at_copy_)
    move = [number] { throw DeviceError(concat("[copy] copy ", number, " was told to fail")); };
  return Ticket(std::make_unique<Transfer>(std::make_shared<Move>(std::move(move))));
}

// A batch that fails does not stop those after it: they run on whatever it left.
void DeferredBackend::run() {
  std::unique_lock lock(queue_->mutex);
  for (;;) {
    queue_->work.wait(lock, [this] { return queue_->closing || queue_->may_run(); });
    if (queue_->batches.empty()) return;
    const std::shared_ptr<Batch> batch = std::move(queue_->batches.front());
    queue_->batches.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      std::unique_ptr<Commands> commands = inner_->begin();
      for (const Op& op : batch->ops) op(*commands);
      inner_->submit(std::move(commands)).wait();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    batch->ops.clear();
    batch->error = std::move(error);
    batch->done = true;
    queue_->ended.notify_all();
  }
}

}  // namespace moeflux
