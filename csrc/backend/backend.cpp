#include "backend/backend.h"

#include <stdexcept>
#include <utility>

namespace moeflux {

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

int64_t Commands::hold() { throw std::logic_error("hold: these ops run when they are recorded"); }

std::unique_ptr<Buffer> Backend::map(const File& /*file*/, int64_t /*begin*/, int64_t /*bytes*/,
                                     const std::string& /*what*/) {
  return nullptr;
}

}  // namespace moeflux
