// Numbers the command buffers that are committed and not yet completed, and knows which have failed.
//
// A command buffer that failed has not made what later ones read. So all that were committed before somebody noticed
// fail with it. The backend, its tickets and the device's completion handlers share this; the last one frees it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace moeflux::gpu {

class Flight {
 public:
  // The number of the next one. Numbers begin at 1.
  int64_t depart();
  void arrive(int64_t number, const std::string& error);

  int64_t departed() const;
  bool arrived(int64_t number) const;  // whether it and all before it have
  // Waits for it. DeviceError, on every call, when it has failed, or one before it that it built on.
  void wait(int64_t number);
  // The same from what is known now, without waiting.
  void check(int64_t number) const;
  void wait_for_all();

  // Ends the effects of a failure: what departs from now on builds on nothing that failed. False when there was no
  // failure, or when something is still under way.
  bool heal();

 private:
  struct Fault {
    int64_t first;
    int64_t last;  // the last one that it harmed; 0 while that is open
    std::string error;
  };

  const Fault* fault_of(int64_t number) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<bool> under_way_;  // from number arrived_ + 1 on: whether it has arrived
  int64_t departed_ = 0;
  int64_t arrived_ = 0;  // it and all before it
  std::vector<Fault> faults_;
};

}  // namespace moeflux::gpu
