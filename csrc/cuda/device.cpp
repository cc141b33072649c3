#include "cuda/device.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <thread>

#include "core/arena.h"
#include "core/text.h"
#include "core/threads.h"

namespace moeflux::cuda {
namespace {

constexpr int oldest_major = 7;  // compute capability
constexpr int oldest_minor = 5;

class DeviceMemory final : public Buffer {
 public:
  DeviceMemory(std::shared_ptr<Device> device, Address address, int64_t bytes, std::shared_ptr<const void> kept)
      : Buffer(reinterpret_cast<std::byte*>(address), nullptr, bytes, Memory::device),
        device_(std::move(device)),
        kept_(std::move(kept)) {}
  ~DeviceMemory() override {
    const Current current(*device_);
    device_->api().free(reinterpret_cast<Address>(data_));
  }

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<const void> kept_;
};

// Pinned, so that copies run beside everything else. Its address is the same for host and device.
class PinnedMemory final : public Buffer {
 public:
  // Of the driver, or if there is an arena, of that.
  PinnedMemory(std::shared_ptr<Device> device, void* address, std::unique_ptr<Arena> arena, int64_t bytes,
               Memory memory, std::shared_ptr<const void> kept)
      : Buffer(static_cast<std::byte*>(address), bytes, memory),
        device_(std::move(device)),
        arena_(std::move(arena)),
        kept_(std::move(kept)) {}
  ~PinnedMemory() override {
    const Current current(*device_);
    if (arena_)
      device_->api().unpin(host_);
    else
      device_->api().free_host(host_);
  }

 private:
  std::shared_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::shared_ptr<const void> kept_;
};

constexpr size_t least_pinned_arena = size_t{2} << 20;  // what huge pages are for
constexpr size_t touched_each = size_t{64} << 20;       // by a thread
constexpr size_t most_touching = 8;                     // threads

// A child that is forked would share the pages. Then whatever the host writes would go to a copy, and the GPU would
// read the old. False where the system knows no such thing.
bool keep_from_children(std::byte* begin, size_t bytes) {
#if defined(__linux__)
  return madvise(begin, bytes, MADV_DONTFORK) == 0;
#else
  return static_cast<void>(begin), static_cast<void>(bytes), false;
#endif
}

// Has the system give the pages of an arena, which are zeros, by several threads.
void touch(std::byte* begin, size_t bytes) {
  const size_t page = static_cast<size_t>(arena_bytes(1));
  const size_t parts = std::clamp<size_t>(bytes / touched_each, 1, most_touching);
  const size_t each = (bytes / page + parts - 1) / parts * page;
  const auto part = [=](size_t number) {
    for (size_t at = number * each; at < std::min(bytes, (number + 1) * each); at += page)
      *static_cast<volatile std::byte*>(begin + at) = {};
  };
  Threads helpers("that touch memory");
  for (size_t number = 1; number < parts; ++number) helpers.start([=] { part(number); });
  part(0);
  helpers.join();
}

// Memory of the system that the driver has pinned, full of zeros. Large memory of the driver's own takes ten times as
// long, because it has small pages. Null where system or driver refuse that.
std::unique_ptr<Arena> pinned_arena(const Device& device, size_t bytes, const std::string& what) {
  if (bytes < least_pinned_arena || !device.chip().pins_arenas) return nullptr;
  try {
    auto arena = std::make_unique<Arena>(static_cast<int64_t>(bytes), what);
    if (!keep_from_children(arena->data(), bytes)) return nullptr;
    touch(arena->data(), bytes);
    return device.api().pin(arena->data(), bytes, pin_portable | pin_mapped) == success ? std::move(arena) : nullptr;
  } catch (const IoError&) {  // no memory, or no threads
    return nullptr;
  }
}

}  // namespace

// ---- Device ---------------------------------------------------------------------------------------------------------

namespace {

int count_devices(const DriverApi& api) {
  int count = 0;
  check(api.device_count(&count), "cuda: cuDeviceGetCount");
  if (count == 0) throw NoSuchDevice("cuda: expected an NVIDIA GPU, found a driver and no GPU");
  return count;
}

std::string name_of(const DriverApi& api, DeviceNumber number) {
  std::array<char, 256> name{};
  check(api.device_name(name.data(), static_cast<int>(name.size()) - 1, number), "cuda: cuDeviceGetName");
  return name.data();
}

}  // namespace

std::vector<std::string> Device::names() {
  const DriverApi& api = driver();
  std::vector<std::string> names;
  const int count = count_devices(api);
  for (int number = 0; number < count; ++number) {
    DeviceNumber device = 0;
    check(api.device(&device, number), "cuda: cuDeviceGet");
    names.push_back(name_of(api, device));
  }
  return names;
}

Device::Device(int number) : api_(driver()) {
  const int count = count_devices(api_);
  if (number >= count)
    throw DeviceError(
        concat("cuda: device: expected 0 to ", count - 1, ", as many GPUs as the driver shows, found ", number));
  check(api_.device(&number_, number), "cuda: cuDeviceGet");
  const auto attribute = [&](int which) {
    int value = 0;
    check(api_.device_attribute(&value, which, number_), "cuda: cuDeviceGetAttribute");
    return value;
  };
  size_t memory = 0;
  check(api_.device_memory(&memory, number_), "cuda: cuDeviceTotalMem");
  int version = 0;
  check(api_.driver_version(&version), "cuda: cuDriverGetVersion");
  chip_ = {.name = name_of(api_, number_),
           .major = attribute(attribute_major),
           .minor = attribute(attribute_minor),
           .multiprocessors = static_cast<uint32_t>(attribute(attribute_multiprocessors)),
           .shared_bytes = static_cast<uint32_t>(attribute(attribute_shared_bytes_of_block)),
           .shared_bytes_of_multiprocessor = static_cast<uint32_t>(attribute(attribute_shared_bytes_of_multiprocessor)),
           .max_threads = static_cast<uint32_t>(attribute(attribute_max_threads)),
           .l2_bytes = attribute(attribute_l2_bytes),
           .memory_bytes = static_cast<int64_t>(memory),
           .copies_together = api_.copy_batch && version >= driver_of_batches,
           .pins_arenas = attribute(attribute_same_pinned_address) != 0};
  if (!chip_.has(oldest_major, oldest_minor))
    throw DeviceError(concat("cuda: expected a GPU of compute capability ", oldest_major, ".", oldest_minor,
                             " or newer, found ", chip_.name, " of ", chip_.major, ".", chip_.minor));
  check(api_.retain(&context_, number_), "cuda: the GPU gives no context");
}

std::shared_ptr<Device> Device::open(int number) {
  static std::mutex mutex;
  static std::map<std::pair<const DriverApi*, int>, std::weak_ptr<Device>> opened;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Device>& known = opened[{&driver(), number}];
  std::shared_ptr<Device> device = known.lock();
  if (!device) known = device = std::shared_ptr<Device>(new Device(number));
  return device;
}

Device::~Device() {
  {
    const Current current(*this);
    for (const std::vector<EventHandle>& events : events_)
      for (EventHandle event : events) api_.end_event(event);
  }
  api_.release(number_);
}

int64_t Device::free_bytes() const {
  const Current current(*this);
  size_t free = 0;
  size_t total = 0;
  check(api_.memory_info(&free, &total), "cuda: cuMemGetInfo");
  return static_cast<int64_t>(free);
}

std::vector<std::pair<std::string, std::string>> Device::facts() const {
  int version = 0;
  check(api_.driver_version(&version), "cuda: cuDriverGetVersion");
  return {{"compute capability", concat(chip_.major, ".", chip_.minor)},
          {"multiprocessors", std::to_string(chip_.multiprocessors)},
          {"memory", sized(chip_.memory_bytes)},
          {"memory that is free", sized(free_bytes())},
          {"L2", sized(chip_.l2_bytes)},
          {"driver for CUDA", concat(version / 1000, ".", version % 1000 / 10)}};
}

Current::Current(const Device& device) : api_(device.api()), result_(api_.push(device.context())) {}

Current::~Current() {
  ContextHandle before = nullptr;
  if (result_ == success) api_.pop(&before);
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

Stream::Stream(std::shared_ptr<Device> device) : device_(std::move(device)) {
  const Current current(*device_);
  check(device_->api().make_stream(&handle_, stream_non_blocking), "cuda: cuStreamCreate");
}

Stream::~Stream() {
  const Current current(*device_);
  device_->api().wait_stream(handle_);
  device_->api().end_stream(handle_);
}

Event::Event(std::shared_ptr<Device> device, Waiting waiting) : device_(std::move(device)), waiting_(waiting) {
  {
    const std::lock_guard lock(device_->mutex_);
    std::vector<EventHandle>& spare = device_->events_[waiting == Waiting::spins];
    if (!spare.empty()) {
      handle_ = spare.back();
      spare.pop_back();
      return;
    }
  }
  const Current current(*device_);
  const unsigned flags = event_no_timing | (waiting == Waiting::sleeps ? event_blocking_sync : 0);
  check(device_->api().make_event(&handle_, flags), "cuda: cuEventCreate");
}

Event::~Event() {
  const std::lock_guard lock(device_->mutex_);
  device_->events_[waiting_ == Waiting::spins].push_back(handle_);
}

Result Event::record(const Stream& stream) {
  const Current current(*device_);
  return device_->api().record_event(handle_, stream.handle());
}

Result Event::hold(const Stream& stream) const {
  const Current current(*device_);
  return device_->api().hold_for_event(stream.handle(), handle_, 0);
}

Result Event::wait() const {
  const Current current(*device_);
  return when_over(device_->api().wait_event(handle_));
}

Result Event::query() const {
  const Current current(*device_);
  return when_over(device_->api().query_event(handle_));
}

// A call may fail while the work is under way. Whoever hears of that gives away what the work uses.
Result Event::when_over(Result result) const {
  if (result != success && result != error_not_ready)
    while (device_->api().query_event(handle_) == error_not_ready) std::this_thread::yield();
  return result;
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

std::unique_ptr<Buffer> allocate(std::shared_ptr<Device> device, const Stream& stream, int64_t bytes, Memory memory,
                                 const std::string& what, std::shared_ptr<const void> kept) {
  const DriverApi& api = device->api();
  const auto size = static_cast<size_t>(arena_bytes(std::max<int64_t>(1, bytes)));
  const Current current(*device);
  if (memory != Memory::device) {
    std::unique_ptr<Arena> arena = pinned_arena(*device, size, what);
    void* address = arena ? arena->data() : nullptr;
    if (!arena) {
      check(api.allocate_host(&address, size, host_alloc_portable | host_alloc_mapped),
            concat(what, ": expected ", sized(bytes), " of pinned host memory, found none"));
      std::memset(address, 0, size);
    }
    return std::make_unique<PinnedMemory>(std::move(device), address, std::move(arena), bytes, memory, std::move(kept));
  }
  Address address = 0;
  check(api.allocate(&address, size),
        concat(what, ": expected ", sized(bytes), " of memory of ", device->chip().name, ", found none"));
  std::unique_ptr<Buffer> buffer = std::make_unique<DeviceMemory>(device, address, bytes, std::move(kept));
  check(api.clear(address, 0, size, stream.handle()), what);
  check(api.wait_stream(stream.handle()), what);
  return buffer;
}

}  // namespace moeflux::cuda
