// Any backend, with the time of each op. It looks at the clock twice per op, and costs nothing where it is not used.
// Where ops run after they were submitted, each is a batch of its own, so that a step takes longer than without.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "core/op_time.h"

namespace moeflux {

class TimedCommands;

// What the ops of a timed backend took. Only one thread at a time may record ops or take the times.
class OpTimes {
 public:
  // Ops that are alike: the same op, and the same matrices.
  struct Kind {
    const char* op;
    int64_t matrices = 0;  // side by side
    int64_t columns = 0;   // of the first
    int64_t rows = 0;      // of all together
    QuantFormat format = {};
    bool operator==(const Kind&) const = default;
  };

  void add(const Kind& kind, const OpTime& what);  // the numbers of `what`
  // Returns what was added since the last call, in the order in which the kinds were first met. Only a kind that was
  // never met before allocates memory.
  std::vector<OpTime> take();

 private:
  std::vector<std::pair<Kind, OpTime>> kinds_;
};

class TimedBackend final : public Backend {
 public:
  // `times` must outlive it.
  TimedBackend(std::unique_ptr<Backend> inner, OpTimes& times);
  ~TimedBackend() override;

  std::string name() const override { return inner_->name(); }
  std::string describe() const override { return inner_->describe(); }
  std::string isa() const override { return inner_->isa(); }
  std::unique_ptr<Buffer> allocate(int64_t bytes, Memory memory, const std::string& what) override {
    return inner_->allocate(bytes, memory, what);
  }
  bool shares_memory() const override { return inner_->shares_memory(); }
  bool surveys() const override { return inner_->surveys(); }
  int64_t prepare(const WorkSizes& sizes) override { return inner_->prepare(sizes); }
  int64_t held() const override { return inner_->held(); }
  int64_t held_by_device() const override { return inner_->held_by_device(); }
  std::unique_ptr<Buffer> map(const File& file, int64_t begin, int64_t bytes, const std::string& what) override {
    return inner_->map(file, begin, bytes, what);
  }
  int64_t max_row_buffers() const override { return inner_->max_row_buffers(); }
  bool runs_on_submit() const override { return inner_->runs_on_submit(); }
  bool groups_chosen() const override { return inner_->groups_chosen(); }
  void release(int64_t number) override { inner_->release(number); }
  void parallel(int64_t units, const std::function<void(int64_t unit)>& body) override {
    inner_->parallel(units, body);
  }
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;
  Ticket copy_all(std::span<const CopyArgs> copies) override { return inner_->copy_all(copies); }
  Ticket clear(View to, int64_t bytes) override { return inner_->clear(to, bytes); }
  DeltaRoom delta_room() const override { return inner_->delta_room(); }
  Ticket complete(View state, int64_t heads) override { return inner_->complete(state, heads); }

 private:
  std::unique_ptr<Backend> inner_;
  OpTimes& times_;
  double nothing_;                        // seconds of a batch that does next to nothing
  std::unique_ptr<TimedCommands> spare_;  // of a batch that was submitted: steps allocate nothing
};

}  // namespace moeflux
