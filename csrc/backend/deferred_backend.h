// For tests: a device that does its work later, as a GPU does, and that may have memory of its own, as most GPUs have.
//
// Ops are written down when they are recorded. They run on another thread after their batch was submitted, batches in
// order. Two of three batches run as late as possible: when somebody waits for them, or for a later one. The others run
// at once. So everything that the engine does too early shows: memory reused that a batch still reads, results read
// that are not there, arguments that lived only for the call that recorded them.
//
// If it has memory of its own ("apart"), the host has no address of what lies in it, and ops refuse what lies in
// staging. So a forgotten copy shows: as a std::logic_error, or as numbers that are not there. Its ops take the rows of
// a session in a few buffers only.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "backend/apart_memory.h"
#include "backend/backend.h"
#include "core/threads.h"

namespace moeflux {

class DeferredBackend final : public Backend {
 public:
  // The work is done by `inner`. With `apart`, the copy beside the batches of number `fail_at_copy` fails.
  DeferredBackend(std::unique_ptr<Backend> inner, bool apart, int64_t fail_at_copy);
  ~DeferredBackend() override;

  std::string name() const override { return inner_->name(); }
  std::string describe() const override { return inner_->describe() + (apart_ ? ", apart" : ", deferred"); }
  std::string isa() const override { return inner_->isa(); }
  std::unique_ptr<Buffer> allocate(int64_t bytes, Memory memory, const std::string& what) override;
  int64_t prepare(const WorkSizes& sizes) override;
  int64_t held() const override { return inner_->held(); }
  int64_t held_by_device() const override { return apart_ ? held_there_->load() : inner_->held_by_device(); }
  bool shares_memory() const override { return !apart_ && inner_->shares_memory(); }
  bool surveys() const override { return inner_->surveys(); }
  std::unique_ptr<Buffer> map(const File& file, int64_t begin, int64_t bytes, const std::string& what) override {
    return apart_ ? nullptr : inner_->map(file, begin, bytes, what);
  }
  int64_t max_row_buffers() const override { return apart_ ? apart_row_buffers : inner_->max_row_buffers(); }
  bool runs_on_submit() const override { return true; }
  void release(int64_t number) override;
  void parallel(int64_t units, const std::function<void(int64_t unit)>& body) override {
    inner_->parallel(units, body);
  }
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;
  Ticket copy_all(std::span<const CopyArgs> copies) override;
  Ticket clear(View to, int64_t bytes) override;
  DeltaRoom delta_room() const override { return inner_->delta_room(); }
  Ticket complete(View state, int64_t heads) override;

 private:
  friend class DeferredCommands;
  struct Batch;
  struct Queue;
  class Completion;
  class Move;
  class Transfer;

  void run();
  Ticket transfer(std::function<void()> move);

  std::unique_ptr<Backend> inner_;
  bool apart_;
  int64_t fail_at_copy_;
  std::atomic<int64_t> copies_{0};  // beside the batches
  std::shared_ptr<std::atomic<int64_t>> held_there_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<Queue> queue_;
  Threads thread_{"that run batches"};
};

}  // namespace moeflux
