#include "engine/deferred_ring.h"

#include <exception>
#include <utility>

#include "core/error.h"

namespace moeflux {

DeferredRing::DeferredRing(int depth, size_t max_leases) : entries_(static_cast<size_t>(depth)) {
  for (Entry& entry : entries_) reserve_lists(entry, static_cast<int64_t>(max_leases));
}

DeferredRing::~DeferredRing() {
  try {
    drain();
  } catch (const std::exception&) {
    // Whoever cared about the batch has gone.
  }
}

int64_t DeferredRing::tables() const {
  int64_t bytes = 0;
  for (const Entry& entry : entries_) bytes += held_bytes(entry);
  return bytes;
}

void DeferredRing::push(Ticket ticket, std::vector<Lease>& leases) {
  if (size_ == entries_.size()) pop();
  Entry& entry = entries_[(oldest_ + size_) % entries_.size()];
  entry.ticket = std::move(ticket);
  std::swap(entry.leases, leases);
  ++size_;
}

void DeferredRing::collect() {
  while (!empty() && entries_[oldest_].ticket.done()) pop();
}

void DeferredRing::pop() {
  if (empty()) return;
  Entry& entry = entries_[oldest_];
  oldest_ = (oldest_ + 1) % entries_.size();
  --size_;
  Ticket ticket = std::move(entry.ticket);
  if (!ticket.done()) ++waits_;
  try {
    ticket.wait();
  } catch (...) {
    entry.leases.clear();
    throw;
  }
  entry.leases.clear();
}

void DeferredRing::reach() noexcept {
  for (size_t i = 0; i < size_; ++i) {
    try {
      entries_[(oldest_ + i) % entries_.size()].ticket.wait();
    } catch (...) {  // `pop` says so
    }
  }
}

void DeferredRing::drain() {
  std::exception_ptr first;
  while (!empty()) {
    try {
      pop();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace moeflux
