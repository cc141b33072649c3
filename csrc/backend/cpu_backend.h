// The CPU as a device: memory from the system, ops that run while they are recorded.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "core/thread_pool.h"
#include "kernels/cpu/isa.h"

namespace moeflux {

class CpuCommands;

class CpuBackend final : public Backend {
 public:
  // With `exact`, all products and attention compute with f32 numbers.
  CpuBackend(const std::string& isa, bool exact, int threads, int64_t fail_at_op);
  ~CpuBackend() override;

  std::string name() const override { return "cpu"; }
  std::string describe() const override;
  std::string isa() const override { return isa_.name; }
  std::unique_ptr<Buffer> allocate(int64_t bytes, Memory memory, const std::string& what) override;
  int64_t prepare(const WorkSizes& sizes) override;
  int64_t held() const override { return *buffers_ + prepared_; }
  static int64_t prepared_bytes(const WorkSizes& sizes);
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;
  void parallel(int64_t units, const std::function<void(int64_t unit)>& body) override { pool_.parallel(units, body); }
  void observe(ActivationObserver* observer) override { observer_ = observer; }

 private:
  friend class CpuCommands;

  void keep(std::unique_ptr<CpuCommands> batch);

  const cpu::Isa isa_;
  ThreadPool pool_;
  int64_t fail_at_op_;
  std::atomic<int64_t> ops_{0};
  // Bytes of the buffers that exist. The buffers share the count, because they may outlive the backend.
  std::shared_ptr<std::atomic<int64_t>> buffers_ = std::make_shared<std::atomic<int64_t>>(0);
  ActivationObserver* observer_ = nullptr;
  WorkSizes sizes_;  // what was prepared for
  int64_t prepared_ = 0;
  // A batch that has been submitted, kept with its scratch for the next `begin`: steps allocate nothing.
  std::atomic<CpuCommands*> spare_{nullptr};
};

}  // namespace moeflux
