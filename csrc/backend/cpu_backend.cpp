#include "backend/cpu_backend.h"

#include <exception>
#include <utility>

#include "backend/cpu_commands.h"
#include "core/arena.h"
#include "core/error.h"

namespace moeflux {
namespace {

class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(std::unique_ptr<Arena> arena, std::shared_ptr<std::atomic<int64_t>> held)
      : Buffer(arena->data(), arena->bytes()), arena_(std::move(arena)), held_(std::move(held)) {
    *held_ += arena_bytes(bytes_);
  }
  ~CpuBuffer() override { *held_ -= arena_bytes(bytes_); }

 private:
  std::unique_ptr<Arena> arena_;
  std::shared_ptr<std::atomic<int64_t>> held_;
};

// A batch that failed. One that did not needs no state: it was done when it was submitted.
class Failure final : public Ticket::State {
 public:
  explicit Failure(std::exception_ptr error) : error_(std::move(error)) {}
  void wait() override { std::rethrow_exception(error_); }
  bool done() const override { return true; }

 private:
  std::exception_ptr error_;
};

}  // namespace

CpuBackend::CpuBackend(const std::string& isa, int threads, int64_t fail_at_op)
    : isa_(cpu::choose_isa(isa)), pool_(threads), fail_at_op_(fail_at_op) {}

CpuBackend::~CpuBackend() {
  if (CpuCommands* spare = spare_.exchange(nullptr)) CpuCommands::destroy(spare);
}

std::string CpuBackend::describe() const {
  return concat("cpu: ", isa_.name, ", ", pool_.threads(), pool_.threads() == 1 ? " thread" : " threads");
}

std::unique_ptr<Buffer> CpuBackend::allocate(int64_t bytes, const std::string& what) {
  return std::make_unique<CpuBuffer>(std::make_unique<Arena>(bytes, what), buffers_);
}

int64_t CpuBackend::prepared_bytes(const WorkSizes& sizes) { return CpuCommands::Room::of(sizes).bytes(); }

int64_t CpuBackend::prepare(const WorkSizes& sizes) {
  return prepared_ = std::make_unique<CpuCommands>(*this)->prepare(sizes);
}

std::unique_ptr<Commands> CpuBackend::begin() {
  if (CpuCommands* spare = spare_.exchange(nullptr)) return std::unique_ptr<Commands>(spare);
  return std::make_unique<CpuCommands>(*this);
}

Ticket CpuBackend::submit(std::unique_ptr<Commands> commands) {
  std::exception_ptr error = static_cast<CpuCommands&>(*commands).take_error();
  return error ? Ticket(std::make_unique<Failure>(std::move(error))) : Ticket();
}

}  // namespace moeflux
