#include "engine/recorder.h"

#include "core/lists.h"

namespace moeflux {

Recorder::Recorder(Backend& backend, int ring_depth, int64_t leases)
    : backend_(backend), ring_(ring_depth, static_cast<size_t>(leases)) {
  leases_.reserve(static_cast<size_t>(leases));
}

int64_t Recorder::planned_tables(int ring_depth, int64_t leases) {
  return leases * entry_bytes<std::vector<Lease>> + DeferredRing::planned_tables(ring_depth, leases);
}

int64_t Recorder::tables() const {
  return static_cast<int64_t>(leases_.capacity()) * entry_bytes<std::vector<Lease>> + ring_.tables();
}

void Recorder::begin(StepStats& stats, const Interruption& interruption) {
  stats_ = &stats;
  interruption_ = &interruption;
  ring_waits_ = ring_.waits();
}

void Recorder::finish() {
  drain();
  leases_.clear();
  stats_->waits += ring_.waits() - ring_waits_;
}

void Recorder::abandon() noexcept {
  commands_.reset();
  release();
  try {
    drain();
  } catch (...) {
    // Report the failure that led here, not this one.
  }
  leases_.clear();
}

Commands& Recorder::current() {
  if (!commands_) commands_ = backend_.begin();
  return *commands_;
}

Ticket Recorder::submit() {
  Ticket ticket = backend_.submit(std::move(commands_));
  ++stats_->submissions;
  return ticket;
}

void Recorder::send() {
  if (!ahead_) return defer(submit());
  backend_.settle(current());
  ahead_->push_back(std::move(commands_));
}

void Recorder::defer(Ticket ticket) { ring_.push(std::move(ticket), leases_); }

void Recorder::await(Ticket ticket) {
  ++stats_->waits;
  ticket.wait();
  leases_.clear();
}

}  // namespace moeflux
