// Experts of one token that the host computes, beside a device with memory of its own. They lie in host slots and need
// not be moved. What the host makes of them has the bits that the device would make, so whoever computes an expert
// changes no bit.
//
// The device brings x to the host with the router's choice. The host's threads work from then on, while what the device
// does next is recorded. The batch that needs the outputs holds until they are in the host's memory, and fetches them
// to where the sum of the experts finds them.
#pragma once

#include <chrono>
#include <memory>
#include <ranges>
#include <vector>

#include "backend/backend.h"
#include "backend/host_experts.h"
#include "core/thread_pool.h"
#include "engine/experts/expert_call.h"
#include "engine/experts/expert_groups.h"
#include "engine/experts/expert_slots.h"

namespace moeflux {

class ExpertsOnCpu {
 public:
  // `options` are resolved, and there are host slots. Nothing is in the slots yet: what is copied and computed to
  // measure both is done there.
  ExpertsOnCpu(const StoreDirectory& store, ExpertSlots& slots, Backend& backend, const EngineOptions& options);
  ~ExpertsOnCpu();
  // Bytes of the host's memory: planned with resolved options, and held.
  static int64_t planned_bytes(const StoreDirectory& store, const EngineOptions& options);
  int64_t bytes() const;

  // Whether this layer's experts may be computed here.
  bool serves(const ExpertCall& call) const;
  // Whether guessed experts stay in host slots, too.
  bool keeps_guesses() const { return all_; }
  // Of so many experts in host slots that a layer lacks, how many to compute here, where so many others are on their
  // way to the device: all, or what is over soonest.
  int64_t share(int64_t experts, int64_t coming) const;

  // Records that x comes to the host.
  void record_x(const ExpertCall& call) const;
  // An expert in a host slot, which is kept until it is computed.
  void add(const ExpertCall& call, const ExpertGroups::Group& group, Lease lease);
  // Lets the threads begin with those that were added.
  void begin();
  bool any() const { return !experts_.empty(); }
  // Those that were added.
  auto experts() const { return experts_ | std::views::transform(&HostExpert::index); }
  // Records that the outputs come to the device. The batch holds before.
  void record_outputs(const ExpertCall& call) const;
  // Returns when they are there, and gives up the slots. It works, too.
  void finish();

 private:
  // Seconds that it takes to move an expert, to have anything computed here and back on the device, and to compute an
  // expert.
  struct Times {
    double moved = 0;
    double call = 0;
    double computed = 0;
  };
  // What the threads do.
  struct Work {
    HostExperts& experts;
    void operator()(int64_t) const { experts.work(); }
  };

  Times measured(Backend& backend, int64_t layer, int64_t most);
  double computed_once(Backend& backend, int64_t layer, int64_t first, int64_t count);
  const float* x() const { return reinterpret_cast<const float*>(memory_->host()); }
  int64_t out_place(int64_t pair) const { return (1 + pair) * row_bytes_; }
  float* out(int64_t pair) const { return reinterpret_cast<float*>(memory_->host() + out_place(pair)); }

  ExpertSlots& slots_;
  int64_t row_bytes_;
  std::unique_ptr<Buffer> memory_;  // x, then the output of each place of the choice, then the room of the kernels
  std::byte* room_;
  HostExperts kernels_;
  Work work_{kernels_};
  std::vector<HostExpert> experts_;
  std::vector<int32_t> pairs_;  // of each: its place in the choice
  std::vector<Lease> leases_;
  ExpertFlavour flavour_;
  bool has_begun_ = false;
  ThreadPool threads_;
  bool all_;
  bool pays_ = true;
  Times times_;
};

}  // namespace moeflux
