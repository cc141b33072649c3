// One NVIDIA GPU, in the context that all libraries of a process share (torch's, too): its facts, its memory, events.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cuda/launches.h"
#include "cuda/libraries.h"

namespace moeflux::cuda {

class Device : public std::enable_shared_from_this<Device> {
 public:
  // The GPU that the driver shows under this number, the same object while anybody has it: a context takes a tenth of
  // a second. NoSuchDevice or DeviceError, with the reason.
  static std::shared_ptr<Device> open(int number = 0);
  // The names of all that the driver shows, in the order of their numbers; none is used for that.
  static std::vector<std::string> names();
  ~Device();

  const DriverApi& api() const { return api_; }
  const Chip& chip() const { return chip_; }
  ContextHandle context() const { return context_; }
  int64_t free_bytes() const;
  // Facts for a report, as label and text.
  std::vector<std::pair<std::string, std::string>> facts() const;

 private:
  friend class Event;

  explicit Device(int number);

  const DriverApi& api_;
  DeviceNumber number_ = 0;
  ContextHandle context_ = nullptr;
  Chip chip_;
  std::mutex mutex_;
  std::vector<EventHandle> events_[2];  // not in use; those that sleep and those that spin
};

// Makes the device's context that of this thread, as every call of the driver wants it, while this object lives.
class Current {
 public:
  explicit Current(const Device& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const DriverApi& api_;
  Result result_;
};

class Stream {
 public:
  explicit Stream(std::shared_ptr<Device> device);
  ~Stream();  // waits for what is on it
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }

 private:
  std::shared_ptr<Device> device_;
  StreamHandle handle_ = nullptr;
};

// A place in a stream that the host can wait for. Who waits either sleeps, which leaves its core to others, or spins,
// which takes microseconds less.
enum class Waiting { sleeps, spins };

class Event {
 public:
  Event(std::shared_ptr<Device> device, Waiting waiting);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  Result record(const Stream& stream);
  // What comes on the stream from here on begins after the event.
  Result hold(const Stream& stream) const;
  // What the driver says of the work before the event, or of anything that failed earlier. Either way it is over.
  Result wait() const;
  Result query() const;  // error_not_ready while it is under way

 private:
  Result when_over(Result result) const;

  std::shared_ptr<Device> device_;
  Waiting waiting_;
  EventHandle handle_ = nullptr;
};

// Memory of the device, or of the host where the device reaches it. It is zeroed. DeviceError when there is none.
std::unique_ptr<Buffer> allocate(std::shared_ptr<Device> device, const Stream& stream, int64_t bytes, Memory memory,
                                 const std::string& what, std::shared_ptr<const void> kept);

}  // namespace moeflux::cuda
