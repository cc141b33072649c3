// A loaded model: weights, expert slots, scratch, and the turn-taking of its sessions.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/mirror.h"
#include "backend/timed_backend.h"
#include "devices/devices.h"
#include "engine/activation_moments.h"
#include "engine/draft_governor.h"
#include "engine/drafts.h"
#include "engine/experts/expert_side.h"
#include "engine/footprint.h"
#include "engine/layer_state.h"
#include "engine/model.h"
#include "engine/next_step.h"
#include "engine/ngram_feed.h"
#include "engine/piece.h"
#include "engine/recorder.h"
#include "engine/row_pool.h"
#include "engine/scratch.h"
#include "engine/session_memory.h"
#include "engine/turn.h"
#include "format/store_directory.h"
#include "io/reader.h"
#include "moeflux.h"

namespace moeflux {

// For tests: what goes wrong.
struct EngineFaults {
  BackendFaults backend;
  ReaderFactory open = file_readers();  // what experts are read with
  DraftSource drafts = {};              // what is likely to come next, in place of what the model would say
};

// As Engine::open.
std::shared_ptr<Engine> open_engine(StoreDirectory store, const EngineOptions& options, const EngineFaults& faults);

class LoadedEngine final : public Engine {
 public:
  LoadedEngine(StoreDirectory store, const EngineOptions& options, const EngineFaults& faults);

  const Variant& variant() const override { return model_.variant; }
  std::string describe() const override;
  std::unique_ptr<Session> session(const SessionOptions& options) override;
  StepStats evaluate(std::span<Work> work, const Interruption& interruption) override;
  std::string isa() const override { return backend_->isa(); }
  Footprint memory() const override;
  int64_t held() const override { return backend_->held() + experts_.read_buffers() + tables_; }
  int64_t held_by_device() const override { return backend_->held_by_device(); }
  int64_t sessions() const override { return session_memory_.sessions(); }
  int64_t experts() const override { return all_experts(model_.variant); }
  int64_t expert_slots() const override { return experts_.slots(); }
  int64_t host_slots() const override { return experts_.host_slots(); }
  int64_t filled_slots() const override { return experts_.filled_slots(); }
  int64_t filled_host_slots() const override { return experts_.filled_host_slots(); }
  int64_t chunk() const override { return scratch_.rows; }
  double read_rate(double seconds) override;
  double device_rate() override;
  int64_t step_bytes() const override;
  std::vector<OpTime> take_op_times() override;
  void observe_routing(RoutingObserver observer) override;
  // Shows `moments` what the matrices of the store meet, from the next call on; null ends it. The store is the one that
  // was opened. Waits for the call under way. DeviceError where the host does not see activations.
  void observe_activations(const StoreDirectory& store, std::shared_ptr<ActivationMoments> moments);
  void parallel(int64_t units, const std::function<void(int64_t unit)>& body) override;

  Backend& backend() { return *backend_; }
  SessionMemory& session_memory() { return session_memory_; }
  RowPools& row_pools(DType kv_dtype) { return pools_[index_of(kv_dtype)]; }
  RowPools& draft_pools(DType kv_dtype) { return draft_pools_[index_of(kv_dtype)]; }
  int64_t drafts() const { return drafts_; }
  const DraftSource& draft_source() const { return draft_source_; }
  // Whether the model's own layer drafts, and whether what it says counts: only tests know better.
  bool has_draft_layer() const { return model_.variant.draft.has_value(); }
  bool believes_layer() const { return believes_layer_; }
  DraftGovernor& draft_governor() { return draft_governor_; }
  // Whether a session must know the tokens before those that it evaluates.
  bool needs_past() const { return ngrams_.has_tables(); }
  // StateError in a child made by fork, before anything there can wait for a thread that the child does not have.
  void check_process() const;

  // Of the steps that were recorded ahead, how many there were and how many came, for tests.
  std::pair<int64_t, int64_t> steps_ahead();

  void top_k(View logits, std::span<int32_t> ids, std::span<float> values);
  // Of numbers that no batch under way uses.
  void download(const Mirrored& numbers, int64_t bytes);

 private:
  friend class Pass;
  friend class DraftPass;

  // For each type of rows.
  static size_t index_of(DType kv_dtype) { return kv_dtype == DType::i8 ? 2 : kv_dtype == DType::bf16 ? 1 : 0; }
  using PoolsByType = std::array<RowPools, 3>;
  void add_pools(const Variant& variant, PoolsByType& to);

  std::unique_lock<Turn> take_turn(const Interruption& interruption = {});
  void count_tables() { tables_ = experts_.tables() + ngrams_.tables() + recorder_.tables(); }

  int64_t process_;  // the process that opened it, for messages
  int64_t forks_;    // forks() when it was opened
  SessionMemory session_memory_;
  OpTimes op_times_;
  std::shared_ptr<ActivationMoments> moments_;  // before the backend, which borrows them
  std::unique_ptr<Backend> backend_;
  Model model_;
  Scratch scratch_;
  MirroredBuffer picks_;  // top_k: i32 ids, then values
  Speculate speculate_;
  int64_t drafts_;  // the most at once, for a session
  DraftSource draft_source_;
  bool believes_layer_;
  DraftGovernor draft_governor_;
  int64_t prepared_;  // bytes that the backend took for itself
  PoolsByType pools_;
  PoolsByType draft_pools_;  // of the layer that drafts
  ExpertSide experts_;
  NgramFeed ngrams_;
  Recorder recorder_;                // after the members that its batches use
  NextStep next_step_;               // likewise
  std::atomic<int64_t> tables_ = 0;  // bytes of lists, as the last pass left them: whoever asks has not the turn
  Turn turn_;
  std::vector<Piece> pieces_;  // of the pass that has the turn; kept to be reused
  std::vector<Piece> draft_pieces_;
};

}  // namespace moeflux
