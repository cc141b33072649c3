#pragma once

#include <memory>
#include <utility>

namespace moeflux {

// The promise that a batch completes. If a ticket is dropped that nobody waited for, it waits itself, and the batch's
// error is lost.
class Ticket {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;  // throws the batch's error on every call; DeviceError for a device's own
    virtual void reach() { wait(); }
    virtual bool done() const = 0;
  };

  Ticket() = default;  // of nothing: done
  explicit Ticket(std::unique_ptr<State> state) : state_(std::move(state)) {}
  Ticket(Ticket&&) noexcept = default;
  Ticket& operator=(Ticket&& other) noexcept;
  ~Ticket();

  void wait();
  // Waits for what was recorded before the mark. If something failed after the mark, only `wait` throws it.
  void reach();
  bool done() const { return !state_ || state_->done(); }
  State* state() const { return state_.get(); }  // for the backend that made it

 private:
  std::unique_ptr<State> state_;
};

}  // namespace moeflux
