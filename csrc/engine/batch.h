// One evaluation for several sessions: from the check of their work to their new positions, or back to where they were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include "core/interruption.h"
#include "engine/pass.h"
#include "moeflux.h"

namespace moeflux {

class EngineSession;
class LoadedEngine;

class Batch {
 public:
  Batch(LoadedEngine& engine, std::span<Work> work) : engine_(engine), work_(work) {}
  // Leaves the sessions to others, and gives back room for rows that they do not have.
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // As Engine::evaluate.
  StepStats run(const Interruption& interruption);

 private:
  void take_sessions();
  void take_session(size_t index);
  void prepare(const Interruption& interruption, StepStats& stats);
  void draft(const Interruption& interruption, StepStats& stats);
  void fill(Pass& pass);
  void take_back(const std::exception* cause);
  std::string lost() const;
  void check_results();
  void commit(StepStats& stats) noexcept;

  LoadedEngine& engine_;
  std::span<Work> work_;
  size_t taken_ = 0;         // sessions that nobody else may use now
  int64_t left_ = 0;         // tokens that no pass has had yet
  bool can_go_back_ = true;  // whether every session that a pass has had can
};

}  // namespace moeflux
