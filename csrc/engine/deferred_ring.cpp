#include "engine/deferred_ring.h"

#include <exception>
#include <utility>

#include "core/error.h"

namespace moeflux {

DeferredRing::DeferredRing(int depth) : entries_(static_cast<size_t>(depth)) {}

DeferredRing::~DeferredRing() {
  try {
    drain();
  } catch (const std::exception&) {
    // Whoever cared about the batch has gone.
  }
}

void DeferredRing::push(Ticket ticket, std::vector<Lease>& leases) {
  if (size_ == entries_.size()) pop();
  Entry& entry = entries_[(oldest_ + size_) % entries_.size()];
  entry.ticket = std::move(ticket);
  std::swap(entry.leases, leases);
  leases.reserve(entry.leases.capacity());
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
