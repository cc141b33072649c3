#include "backend/backend.h"

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

}  // namespace moeflux
