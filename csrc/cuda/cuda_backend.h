// An NVIDIA GPU as a backend. A batch is recorded first and launched when it is submitted: all of it on one stream,
// where it can be as a graph. Nobody waits for it before somebody asks. A batch that holds is launched up to there, and
// the rest, with what was submitted meanwhile, when it is released.
//
// A batch that is settled has its graphs told, and its words brought behind the batches that are under way. After a
// failure every batch under way fails; the first one begun when nothing is under way any more starts afresh, unless the
// driver has given up the whole process's context.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "cuda/device.h"
#include "cuda/flights.h"
#include "cuda/graphs.h"
#include "cuda/kernels.h"
#include "cuda/recording.h"

namespace moeflux::cuda {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(std::shared_ptr<Device> device, int64_t fail_at_op = -1);
  ~CudaBackend() override;

  std::string name() const override { return "cuda"; }
  std::string describe() const override { return "cuda: " + device_->chip().name; }
  bool shares_memory() const override { return false; }
  // BudgetError when the buffers in the device's memory together would be more than there was to have.
  std::unique_ptr<Buffer> allocate(int64_t bytes, Memory memory, const std::string& what) override;
  int64_t prepare(const WorkSizes& sizes) override;
  int64_t held() const override { return *held_; }
  int64_t held_by_device() const override { return *held_there_; }
  static int64_t prepared_bytes(const WorkSizes& sizes);
  static int64_t prepared_host_bytes(const WorkSizes& sizes);  // the part of it that is not the device's
  // As DeltaRoom.
  static int64_t room_behind(int64_t heads, int64_t rows, int64_t columns);
  // Units of kernels that a model with such rows of keys and values wants, and that must be compiled first.
  static std::vector<std::string> to_compile(const WorkSizes& sizes, DType rows, int device);
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;
  Ticket copy_all(std::span<const CopyArgs> copies) override;
  Ticket clear(View to, int64_t bytes) override;
  DeltaRoom delta_room() const override { return room_behind; }
  Ticket complete(View state, int64_t heads) override;
  bool runs_on_submit() const override { return true; }
  bool records_ahead() const override { return true; }
  void settle(Commands& commands) override;
  bool groups_chosen() const override { return true; }
  void release(int64_t number) override;

  // How many bytes of the device's memory a model may have: what is free, but for a margin that the driver itself and
  // others want.
  static int64_t max_bytes(const Device& device);
  // What comes at the end of a copy beside the batches; null for one of nothing.
  static const Event* end_of(const Ticket& copy);

 private:
  friend class Recording;
  struct Batch;
  struct Submitted;
  struct Spare;

  // Counts `bytes` more as held, until what it returns goes.
  std::shared_ptr<const void> take(int64_t bytes, Memory memory, const std::string& what);
  View room(size_t which, int64_t bytes);
  int64_t room_limit(size_t which) const;
  ListRoom make_lists(int64_t bytes);
  ListRoom take_lists(int64_t bytes);
  void give_back(ListRoom room);
  void launch_submitted();
  bool run(Batch& batch, Event* mark);
  void run(const Item& item, const Work& work, Event* mark);
  template <typename Begin>
  Ticket transfer(const Begin& begin);

  std::shared_ptr<Device> device_;
  int64_t limit_;  // of the device's memory
  int64_t fail_at_op_;
  int64_t ops_ = 0;
  std::shared_ptr<std::atomic<int64_t>> held_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<std::atomic<int64_t>> held_there_ = std::make_shared<std::atomic<int64_t>>(0);  // by the device
  Kernels kernels_;
  // Looked up once, because any thread may ask for it. Null unless a model was prepared that has pending tokens.
  const Kernel* complete_ = nullptr;
  Stream batches_;
  Stream copies_;
  Graphs graphs_;
  std::shared_ptr<Flights> flights_;
  std::list<Submitted> submitted_;  // what holds, and what came behind it
  int64_t last_hold_ = 0;
  int64_t released_ = 0;  // holds up to this one are over
  std::vector<std::unique_ptr<Buffer>> rooms_;
  bool is_prepared_ = false;
  std::vector<std::unique_ptr<Buffer>> outgrown_;  // rooms that a batch may still use
  std::shared_ptr<Spare> spare_;                   // room for lists
};

}  // namespace moeflux::cuda
