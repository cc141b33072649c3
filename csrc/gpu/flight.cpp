#include "gpu/flight.h"

#include "core/error.h"

namespace moeflux::gpu {

int64_t Flight::depart() {
  const std::lock_guard lock(mutex_);
  under_way_.push_back(false);
  return ++departed_;
}

void Flight::arrive(int64_t number, const std::string& error) {
  {
    const std::lock_guard lock(mutex_);
    under_way_[static_cast<size_t>(number - arrived_ - 1)] = true;
    while (!under_way_.empty() && under_way_.front()) {
      under_way_.pop_front();
      ++arrived_;
    }
    if (!error.empty()) {
      if (faults_.empty() || faults_.back().last)
        faults_.push_back({number, 0, error});
      else if (number < faults_.back().first)
        faults_.back() = {number, 0, error};
    }
  }
  changed_.notify_all();
}

int64_t Flight::departed() const {
  const std::lock_guard lock(mutex_);
  return departed_;
}

bool Flight::arrived(int64_t number) const {
  const std::lock_guard lock(mutex_);
  return arrived_ >= number;
}

void Flight::wait(int64_t number) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return arrived_ >= number; });
  if (const Fault* fault = fault_of(number)) throw DeviceError(fault->error);
}

void Flight::check(int64_t number) const {
  const std::lock_guard lock(mutex_);
  if (const Fault* fault = fault_of(number)) throw DeviceError(fault->error);
}

void Flight::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return arrived_ == departed_; });
}

bool Flight::heal() {
  const std::lock_guard lock(mutex_);
  if (faults_.empty() || faults_.back().last || arrived_ != departed_) return false;
  faults_.back().last = departed_;
  return true;
}

const Flight::Fault* Flight::fault_of(int64_t number) const {
  for (const Fault& fault : faults_)
    if (number >= fault.first && (fault.last == 0 || number <= fault.last)) return &fault;
  return nullptr;
}

}  // namespace moeflux::gpu
