// A GPU behind Metal as a backend: batches become command buffers, waited for when somebody asks.
//
// One batch is recorded at a time. After a fault of the GPU every batch under way fails; the first one begun when
// nothing is under way any more starts afresh.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "backend/backend.h"
#include "metal/device.h"
#include "metal/flight.h"
#include "metal/list_ring.h"

namespace moeflux::metal {

class MetalBackend final : public Backend {
 public:
  explicit MetalBackend(std::unique_ptr<Device> device, int64_t fail_at_op = -1);
  ~MetalBackend() override;

  std::string name() const override { return "metal"; }
  std::string describe() const override { return "metal: " + device_->name(); }
  // BudgetError when that would be more than most_of_working_set of what the system recommends.
  std::unique_ptr<Buffer> allocate(int64_t bytes, const std::string& what) override;
  int64_t prepare(const WorkSizes& sizes) override;
  int64_t held() const override { return *held_; }
  static int64_t prepared_bytes(const WorkSizes& sizes);
  std::unique_ptr<Commands> begin() override;
  Ticket submit(std::unique_ptr<Commands> commands) override;

  static constexpr double most_of_working_set = 0.8;

 private:
  friend class MetalCommands;

  // What ops want beside their arguments, in bytes.
  struct Room {
    int64_t parts = 0;  // sums of spans of attention
    int64_t picks = 0;  // of top_k: values, or ids, that one round leaves to the next
    int64_t lists = 0;  // of pairs and their blocks

    static Room of(const WorkSizes& sizes);
  };

  // Made when it is first asked for, its file compiled before.
  const Pipeline& pipeline(const std::string& file, const std::string& kernel);
  void compile(const std::string& file);

  std::unique_ptr<Device> device_;
  std::unordered_set<std::string> compiled_;  // files
  std::unordered_map<std::string, std::unique_ptr<Pipeline>> pipelines_;
  int64_t fail_at_op_;
  int64_t ops_ = 0;
  std::shared_ptr<std::atomic<int64_t>> held_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<Flight> flight_ = std::make_shared<Flight>();
  std::unique_ptr<Buffer> nothing_;  // stands where a kernel has an argument that is not given
  std::unique_ptr<Buffer> parts_;
  std::unique_ptr<Buffer> picks_[2][2];  // by round, odd or even: values, and ids
  ListRing lists_;
};

}  // namespace moeflux::metal
