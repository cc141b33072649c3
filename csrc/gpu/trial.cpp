#include "gpu/trial.h"

#include <unistd.h>

namespace moeflux::gpu {

Trial::Result Trial::result() {
  const std::lock_guard lock(mutex_);
  if (!result_ || result_->process != getpid()) result_ = attempted();
  return *result_;
}

Trial::Result Trial::attempted() const {
  const pid_t process = getpid();
  try {
    attempt_();
    return {true, "", process};
  } catch (const NoSuchDevice&) {
    return {false, "", process};
  } catch (const Error& error) {
    return {false, error.what(), process};
  }
}

}  // namespace moeflux::gpu
