#include "backend/backend.h"

#include <utility>

#include "backend/backends.h"
#include "backend/cpu_backend.h"
#include "backend/deferred_backend.h"
#include "core/error.h"
#include "core/text.h"

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

namespace {

void check_name(const std::string& name) {
  if (name != "cpu" && name != "auto") throw FormatError(concat("backend: expected auto or cpu, found ", quoted(name)));
}

}  // namespace

std::unique_ptr<Backend> make_backend(const std::string& name, const std::string& isa, int threads, int64_t fail_at_op,
                                      bool deferred) {
  check_name(name);
  std::unique_ptr<Backend> backend = std::make_unique<CpuBackend>(isa, threads, fail_at_op);
  if (deferred) backend = std::make_unique<DeferredBackend>(std::move(backend));
  return backend;
}

int64_t prepared_bytes(const std::string& name, const WorkSizes& sizes) {
  check_name(name);
  return CpuBackend::prepared_bytes(sizes);
}

}  // namespace moeflux
