// Whether the GPU of this machine works, which "auto" asks before it means the GPU.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <optional>
#include <string>

#include "core/error.h"

namespace moeflux::gpu {

// The machine has no GPU of the kind that the kernels are written for, or nothing that drives one. Nothing is wrong
// with it.
struct NoSuchDevice : DeviceError {
  using DeviceError::DeviceError;
};

// It is tried once, so that no model finds out in the middle of a text.
class Trial {
 public:
  // `attempt` throws NoSuchDevice, or the error that says why the GPU does not work.
  explicit Trial(void (*attempt)()) : attempt_(attempt) {}

  bool works() { return result().works; }
  // Why a GPU that should work does not, in the words of whoever refused. Empty when it works, or when there is none.
  std::string failure() { return result().failure; }
  // The next question tries again, after `change`.
  template <typename Change>
  void again(Change change) {
    const std::lock_guard lock(mutex_);
    result_.reset();
    change();
  }

 private:
  struct Result {
    bool works = false;
    std::string failure;
    pid_t process = 0;  // a child that is forked from it may have lost the GPU
  };

  Result result();
  Result attempted() const;

  void (*attempt_)();
  std::mutex mutex_;
  std::optional<Result> result_;
};

}  // namespace moeflux::gpu
