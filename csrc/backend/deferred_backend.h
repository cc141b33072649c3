// For tests: a device that does its work later, as a GPU does.
//
// Ops are written down when they are recorded and run on another thread after their batch was submitted, batches in
// order. Two of three batches run as late as can be: when somebody waits for them, or for one behind them; the
// others run at once. So whatever the engine does too early shows: memory reused that a batch still reads, results read
// that are not there, arguments that lived only for the call that recorded them.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "core/threads.h"

namespace moeflux {

class DeferredBackend final : public Backend {
 public:
  // The work is done by `inner`.
  explicit DeferredBackend(std::unique_ptr<Backend> inner);
  ~DeferredBackend() override;

  std::string name() const override { return inner_->name(); }
  std::string describe() const override { return inner_->describe() + ", deferred"; }
  std::string isa() const override { return inner_->isa(); }
  std::unique_ptr<Buffer> allocate(int64_t bytes, const std::string& what) override;
  int64_t prepare(const WorkSizes& sizes) override { return inner_->prepare(sizes); }
  int64_t held() const override { return inner_->held(); }
  std::unique_ptr<Buffer> map(const File& file, int64_t begin, int64_t bytes, const std::string& what) override {
    return inner_->map(file, begin, bytes, what);
  }
  bool runs_ahead() const override { return true; }
  void release(int64_t number) override;
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;

 private:
  friend class DeferredCommands;
  struct Batch;
  struct Queue;
  class Completion;

  void run();

  std::unique_ptr<Backend> inner_;
  std::shared_ptr<Queue> queue_;
  Threads thread_{"that run batches"};
};

}  // namespace moeflux
