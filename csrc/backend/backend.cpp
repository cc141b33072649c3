#include "backend/backend.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "core/error.h"

namespace moeflux {

std::byte* Buffer::host() const {
  if (!host_) throw std::logic_error("[Buffer] expected memory that the host reaches, found memory of the device");
  return host_;
}

Matrix Matrix::slice(int64_t first, int64_t count) const {
  Matrix part = *this;
  part.rows = count;
  part.weight.offset += first * format.weight_row_bytes(columns);
  part.scales.offset += first * format.scale_row_bytes(columns);
  part.biases.offset += first * format.scale_row_bytes(columns);
  return part;
}

Ticket& Ticket::operator=(Ticket&& other) noexcept {
  Ticket dropped(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}

Ticket::~Ticket() {
  if (!state_) return;
  try {
    state_->wait();
  } catch (...) {  // nobody asked how it went
  }
}

void Ticket::wait() {
  if (state_) state_->wait();
}

void Ticket::reach() {
  if (state_) state_->reach();
}

void Commands::survey(View /*logits*/, int64_t /*count*/, View /*found*/) {
  throw std::logic_error("survey: the host has the logits");
}

void Commands::shortlist(std::span<const ShortlistArgs> /*rows*/, int64_t /*count*/) {
  throw std::logic_error("shortlist: the host has the logits");
}

int64_t Commands::hold() { throw std::logic_error("hold: these ops run when they are recorded"); }

void Commands::after(const Ticket& /*copy*/) { throw std::logic_error("after: these ops run when they are recorded"); }

void Backend::settle(Commands& /*commands*/) { throw std::logic_error("settle: batches are not recorded ahead"); }

std::unique_ptr<Buffer> Backend::map(const File& /*file*/, int64_t /*begin*/, int64_t /*bytes*/,
                                     const std::string& /*what*/) {
  return nullptr;
}

Ticket Backend::copy_all(std::span<const CopyArgs> copies) {
  for (const auto& [from, to, bytes] : copies)
    if (bytes) std::memcpy(to.host(), from.host(), static_cast<size_t>(bytes));
  return {};
}

void Backend::observe(ActivationObserver* observer) {
  if (observer)
    throw DeviceError("observe: expected ops that run while they are recorded, as on the cpu, found " + name());
}

Ticket Backend::clear(View to, int64_t bytes) {
  if (bytes) std::memset(to.host(), 0, static_cast<size_t>(bytes));
  return {};
}

}  // namespace moeflux
