// A GPU that Metal drives, as a backend. Batches become command buffers. Nobody waits for them before somebody asks.
//
// One batch is recorded at a time. After a fault of the GPU every batch under way fails; the first one begun when
// nothing is under way any more starts afresh.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "gpu/flight.h"
#include "metal/device.h"
#include "metal/list_ring.h"
#include "metal/pipelines.h"

namespace moeflux::metal {

class MetalBackend final : public Backend {
 public:
  // `max_work`: multiplications after which a command buffer departs.
  MetalBackend(std::unique_ptr<Device> device, double max_work, int64_t fail_at_op = -1);
  ~MetalBackend() override;

  std::string name() const override { return "metal"; }
  std::string describe() const override { return "metal: " + device_->name(); }
  bool surveys() const override { return false; }
  // BudgetError when all buffers together would be more than `max_bytes`.
  std::unique_ptr<Buffer> allocate(int64_t bytes, Memory memory, const std::string& what) override;
  std::unique_ptr<Buffer> map(const File& file, int64_t begin, int64_t bytes, const std::string& what) override;
  int64_t prepare(const WorkSizes& sizes) override;
  int64_t held() const override { return *held_; }
  static int64_t prepared_bytes(const WorkSizes& sizes);
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;
  int64_t max_row_buffers() const override;
  bool runs_on_submit() const override { return true; }
  void release(int64_t number) override { released_->raise(static_cast<uint64_t>(number)); }

  // How many bytes all buffers may have. It is a part of what the system recommends to keep in use, because others use
  // the GPU too.
  static int64_t max_bytes(const Device& device);

 private:
  friend class MetalCommands;

  static constexpr int64_t max_carried = 16;  // rows of a call whose spans may come in rounds

  // What ops need besides their arguments, in bytes.
  struct Room {
    int64_t parts = 0;    // sums of spans of attention
    int64_t carried = 0;  // what one round of spans leaves to the next
    int64_t picks = 0;    // values, or ids, that one round of top_k leaves to the next
    int64_t lists = 0;    // of pairs and their blocks
    int64_t tables = 0;   // of a session's blocks of rows
    int64_t chosen = 0;   // pairs of a row

    static Room of(const WorkSizes& sizes);
  };

  // Counts `bytes` more as held, until what it returns goes.
  std::shared_ptr<const void> take(int64_t bytes, const std::string& what);
  void reserve_carried(int64_t bytes);

  std::unique_ptr<Device> device_;
  Pipelines pipelines_;
  double max_work_;
  int64_t fail_at_op_;
  int64_t ops_ = 0;
  std::shared_ptr<std::atomic<int64_t>> held_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<gpu::Flight> flight_ = std::make_shared<gpu::Flight>();
  std::shared_ptr<Event> marks_;     // reached, by number
  std::shared_ptr<Event> released_;  // holds that batches need not wait for any more, by number
  int64_t last_mark_ = 0;
  int64_t last_hold_ = 0;
  std::unique_ptr<Buffer> nothing_;  // stands in for an argument that is not given
  std::unique_ptr<Buffer> parts_;
  std::unique_ptr<Buffer> carried_[2];     // by round, odd or even
  std::unique_ptr<Buffer> picks_[2][2];    // by round, odd or even: values, and ids
  std::unique_ptr<Buffer> chosen_blocks_;  // of experts that the GPU chose itself
  std::unique_ptr<Buffer> chosen_pairs_;
  ListRing lists_;
  ListRing tables_;
};

}  // namespace moeflux::metal
