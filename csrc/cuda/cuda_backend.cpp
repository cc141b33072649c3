#include "cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <utility>

#include "core/arena.h"
#include "core/error.h"
#include "core/text.h"
#include "cuda/cuda_commands.h"
#include "cuda/model_units.h"

namespace moeflux::cuda {
namespace {

constexpr int64_t least_lists = 1 << 16;
constexpr int64_t least_margin = int64_t{256} << 20;
constexpr int64_t batches_ahead = 2;  // of a step that is recorded before the call that wants it

using Released = std::atomic<uint32_t>;  // in memory that the GPU reads, too
static_assert(sizeof(Released) == word_bytes && Released::is_always_lock_free);

// A batch that was launched as number `last`, or not at all: then `error` says why. `mark` is null if it has none.
class Departed final : public Ticket::State {
 public:
  explicit Departed(std::shared_ptr<Flights> flights) : flights_(std::move(flights)) {}

  void become(int64_t last, std::shared_ptr<Event> mark, std::exception_ptr error) {
    last_ = last;
    mark_ = std::move(mark);
    error_ = std::move(error);
  }

  void wait() override {
    if (last_) flights_->wait(last_);
    if (error_) std::rethrow_exception(error_);
  }
  void reach() override {
    if (!mark_ || error_ || mark_->wait() != success) return wait();
    flights_->check(last_);
  }
  bool done() const override { return last_ == 0 || flights_->arrived(last_); }

 private:
  std::shared_ptr<Flights> flights_;
  int64_t last_ = 0;
  std::shared_ptr<Event> mark_;
  std::exception_ptr error_;
};

// A copy beside the batches.
class Transfer final : public Ticket::State {
 public:
  explicit Transfer(std::shared_ptr<Event> end) : end_(std::move(end)) {}

  void become(Result begun) { failed_ = begun; }
  void wait() override { say(end_->wait()); }
  void reach() override {
    Result ended = error_not_ready;
    while (ended == error_not_ready) ended = end_->query();  // to wait takes microseconds even for what is over
    say(ended);
  }
  bool done() const override { return end_->query() != error_not_ready; }
  Event& end() const { return *end_; }

 private:
  // Several threads may wait for a copy: the one whose memory it leaves, and whoever wants what is copied. A failure
  // that one of them has seen is every other's, too.
  void say(Result ended) {
    Result first = success;
    if (ended != success) failed_.compare_exchange_strong(first, ended);
    if (const Result result = failed_) throw DeviceError(failure_of(result));
  }

  std::shared_ptr<Event> end_;
  std::atomic<Result> failed_ = success;
};

}  // namespace

// Rooms for lists that no batch uses. Whoever waits for a batch gives them back, on any thread.
struct CudaBackend::Spare {
  std::mutex mutex;
  std::vector<ListRoom> rooms;

  void add(ListRoom room) {
    room.used = 0;
    const std::lock_guard lock(mutex);
    rooms.push_back(std::move(room));
  }
};

struct CudaBackend::Batch final : HasRecording, CudaCommands {
  explicit Batch(CudaBackend& backend) : HasRecording{Recording(backend)}, CudaCommands(recording) {}

  bool is_settled = false;
  size_t brought = 0;                               // items, the first ones, that were launched by then
  std::vector<std::optional<Graphs::Told>> told{};  // of its stretches, in order
};

namespace {

// Launches that may be a graph, as far as they go without anything between.
size_t stretch_of(std::span<const Item> items) {
  const auto may_overlap = [](const Item& item) { return item.kind == Item::Kind::launch && !item.ends_first; };
  return static_cast<size_t>(std::ranges::find_if_not(items, may_overlap) - items.begin());
}

}  // namespace

// ---- Memory ---------------------------------------------------------------------------------------------------------

CudaBackend::CudaBackend(std::shared_ptr<Device> device, int64_t fail_at_op)
    : device_(std::move(device)),
      limit_(max_bytes(*device_)),
      fail_at_op_(fail_at_op),
      kernels_(device_),
      batches_(device_),
      copies_(device_),
      graphs_(device_),
      flights_(std::make_shared<Flights>(device_)),
      released_(allocate(word_bytes, Memory::host_visible, "holds")),
      spare_(std::make_shared<Spare>()) {
  new (released_->host()) Released(0);
}

CudaBackend::~CudaBackend() {
  release(last_hold_);
  flights_->wait_for_all();
  // What was brought for batches that were dropped is in no flight.
  const Current current(*device_);
  device_->api().wait_stream(batches_.handle());
}

int64_t CudaBackend::max_bytes(const Device& device) {
  const int64_t margin = std::max(least_margin, device.chip().memory_bytes / 32);
  return std::max<int64_t>(0, device.free_bytes() - margin);
}

int64_t CudaBackend::prepared_host_bytes(const WorkSizes& sizes) {
  const int64_t lists = arena_bytes(std::max(least_lists, CudaCommands::list_bytes(sizes)));
  return arena_bytes(word_bytes) + (sizes.batches + batches_ahead) * lists;
}

int64_t CudaBackend::prepared_bytes(const WorkSizes& sizes) {
  // Host and device each have room for lists.
  int64_t bytes = 2 * prepared_host_bytes(sizes) - arena_bytes(word_bytes);
  for (const RoomSize& room : CudaCommands::rooms(sizes))
    if (room.bytes) bytes += arena_bytes(room.bytes);
  return bytes;
}

std::vector<std::string> CudaBackend::to_compile(const WorkSizes& sizes, DType rows, int device) {
  return cuda::to_compile(units_for(sizes, {rows}), Device::open(device)->chip());
}

const Event* CudaBackend::end_of(const Ticket& copy) {
  const auto* transfer = static_cast<const Transfer*>(copy.state());
  return transfer ? &transfer->end() : nullptr;
}

std::shared_ptr<const void> CudaBackend::take(int64_t bytes, Memory memory, const std::string& what) {
  const int64_t taken = arena_bytes(bytes);
  const int64_t there = memory == Memory::device ? taken : 0;
  if (there > limit_ - *held_there_)
    throw BudgetError(
        concat(what, ": expected at most ", sized(std::max<int64_t>(0, limit_ - *held_there_)),
               ", which is left of the ", sized(limit_), " that were free on ", device_->chip().name, ", found ",
               sized(taken), ": load with fewer `expert_slots` or a shorter `context`, or backend=\"cpu\""),
        taken - (limit_ - *held_there_));
  *held_ += taken;
  *held_there_ += there;
  return {nullptr, [held = held_, held_there = held_there_, taken, there](const void*) {
            *held -= taken;
            *held_there -= there;
          }};
}

std::unique_ptr<Buffer> CudaBackend::allocate(int64_t bytes, Memory memory, const std::string& what) {
  return cuda::allocate(device_, copies_, bytes, memory, what, take(bytes, memory, what));
}

int64_t CudaBackend::prepare(const WorkSizes& sizes) {
  const int64_t before = held() - arena_bytes(word_bytes);
  const std::vector<RoomSize> rooms = CudaCommands::rooms(sizes);
  rooms_.resize(rooms.size());
  is_prepared_ = true;
  kernels_.load(units_for(sizes, {}));
  for (size_t i = 0; i < rooms.size(); ++i)
    if (rooms[i].bytes) rooms_[i] = allocate(rooms[i].bytes, Memory::device, rooms[i].what);
  for (int64_t i = 0; i < sizes.batches + batches_ahead; ++i) spare_->add(make_lists(CudaCommands::list_bytes(sizes)));
  return held() - before;
}

View CudaBackend::room(size_t which, int64_t bytes) {
  if (which >= rooms_.size()) rooms_.resize(which + 1);
  std::unique_ptr<Buffer>& room = rooms_[which];
  if (!room || room->bytes() < bytes) {
    std::unique_ptr<Buffer> larger = allocate(bytes, Memory::device, "room of an op");
    if (room) outgrown_.push_back(std::move(room));
    room = std::move(larger);
  }
  return {room.get(), 0};
}

int64_t CudaBackend::room_limit(size_t which) const {
  constexpr int64_t none = std::numeric_limits<int64_t>::max();
  return is_prepared_ ? (rooms_[which] ? rooms_[which]->bytes() : 0) : none;
}

ListRoom CudaBackend::make_lists(int64_t bytes) {
  bytes = std::max(least_lists, bytes);
  return {allocate(bytes, Memory::staging, "lists"), allocate(bytes, Memory::device, "lists")};
}

ListRoom CudaBackend::take_lists(int64_t bytes) {
  {
    const std::lock_guard lock(spare_->mutex);
    const auto fits = [&](const ListRoom& room) { return room.bytes() >= bytes; };
    const auto found = std::ranges::find_if(spare_->rooms, fits);
    if (found != spare_->rooms.end()) {
      ListRoom room = std::move(*found);
      spare_->rooms.erase(found);
      return room;
    }
  }
  return make_lists(bytes);
}

void CudaBackend::give_back(ListRoom room) {
  if (room.device) spare_->add(std::move(room));
}

// ---- Batches --------------------------------------------------------------------------------------------------------

std::unique_ptr<Commands> CudaBackend::begin() {
  if (flights_->heal()) {
    const Current current(*device_);
    check(device_->api().wait_stream(batches_.handle()), "cuda: cuStreamSynchronize");
  }
  return std::make_unique<Batch>(*this);
}

// Its words come to memory that only this batch reads, or that every batch brings anew. So it does no harm that they
// come behind the batches under way, even if the batch is dropped.
void CudaBackend::settle(Commands& commands) {
  auto& batch = static_cast<Batch&>(commands);
  batch.end();
  Recording& recording = batch.recording;
  recording.complete();
  if (const std::exception_ptr error = recording.take_error()) std::rethrow_exception(error);
  const Current current(*device_);
  const Work& work = recording.work();
  const std::span<const Item> items = work.items;
  batch.is_settled = true;
  for (; batch.brought < items.size() && items[batch.brought].brings; ++batch.brought)
    run(items[batch.brought], work, nullptr);
  for (size_t begin = batch.brought; begin < items.size(); ++begin) {
    const auto stretch = items.subspan(begin, stretch_of(items.subspan(begin)));
    batch.told.push_back(graphs_.tell(stretch, work));
    begin += stretch.size();
  }
}

Ticket CudaBackend::submit(std::unique_ptr<Commands> commands) {
  auto& batch = static_cast<Batch&>(*commands);
  Recording& recording = batch.recording;
  if (!batch.is_settled) {
    batch.end();
    recording.complete();
  }
  const Work& work = recording.work();
  std::exception_ptr error = recording.take_error();
  if (!error && work.items.empty()) return {};
  auto departed = std::make_unique<Departed>(flights_);  // first: so what departs has a ticket, whatever fails
  if (error) {
    departed->become(0, nullptr, std::move(error));
    return Ticket(std::move(departed));
  }
  const auto end = std::make_shared<Event>(device_, Waiting::spins);
  const auto is_mark = [](const Item& item) { return item.kind == Item::Kind::mark; };
  const auto mark =
      std::ranges::any_of(work.items, is_mark) ? std::make_shared<Event>(device_, Waiting::spins) : nullptr;
  const auto lists = std::make_shared<std::vector<ListRoom>>(std::move(recording.lists()));
  const std::shared_ptr<const void> kept(nullptr, [lists, spare = spare_](const void*) {
    for (ListRoom& room : *lists) spare->add(std::move(room));
  });
  try {
    run(batch, mark.get());
  } catch (...) {
    error = std::current_exception();
  }
  if (const Result result = end->record(batches_); result != success) {
    if (!error) error = std::make_exception_ptr(DeviceError(failure_of(result)));
    release(last_hold_);  // nobody can wait for an event, so all that was launched must end here
    const Current current(*device_);
    device_->api().wait_stream(batches_.handle());
  }
  departed->become(flights_->depart(end, kept), mark, std::move(error));
  return Ticket(std::move(departed));
}

void CudaBackend::run(const Batch& batch, Event* mark) {
  const Current current(*device_);
  const Work& work = batch.recording.work();
  const std::span<const Item> items = work.items;
  auto told = batch.told.begin();
  for (size_t begin = batch.brought; begin < items.size(); ++begin) {
    const auto stretch = items.subspan(begin, stretch_of(items.subspan(begin)));
    run_stretch(stretch, work, batch.is_settled ? *told++ : graphs_.tell(stretch, work));
    begin += stretch.size();
    if (begin < items.size()) run(items[begin], work, mark);
  }
}

void CudaBackend::run_stretch(std::span<const Item> items, const Work& work, std::optional<Graphs::Told> told) {
  // Since the batch was settled, the graph may have been told another.
  while (told && !graphs_.launch(*told, batches_)) told = graphs_.tell(items, work);
  if (!told)
    for (const Item& item : items) run(item, work, nullptr);
}

void CudaBackend::run(const Item& item, const Work& work, Event* mark) {
  const DriverApi& api = device_->api();
  const StreamHandle stream = batches_.handle();
  void* params = const_cast<std::byte*>(work.params_of(item));
  switch (item.kind) {
    case Item::Kind::launch:
      return check(api.launch(item.kernel->function, item.grid.x, item.grid.y, item.grid.z, item.threads, 1, 1,
                              item.shared_bytes, stream, &params, nullptr),
                   "cuda: cuLaunchKernel");
    case Item::Kind::copy:
      return check(api.copy(item.to, item.from, static_cast<size_t>(item.bytes), stream), "cuda: cuMemcpyAsync");
    case Item::Kind::mark:
      return check(mark->record(batches_), "cuda: cuEventRecord");
    case Item::Kind::hold:
      return check(api.hold_stream(stream, device_address({released_.get()}), static_cast<uint32_t>(item.number),
                                   wait_until_at_least),
                   "cuda: cuStreamWaitValue32");
    case Item::Kind::after:
      return check(item.event->hold(batches_), "cuda: cuStreamWaitEvent");
  }
}

void CudaBackend::release(int64_t number) {
  const std::lock_guard lock(release_mutex_);
  auto& released = *reinterpret_cast<Released*>(released_->host());
  const auto value = static_cast<uint32_t>(number);
  if (static_cast<int32_t>(value - released.load()) > 0) released.store(value);
}

// ---- Copies beside the batches --------------------------------------------------------------------------------------

// Threads that read wait for them, and leave their core to the ops of the CPU meanwhile. The ticket is made first: so
// what begins has one, whatever fails.
template <typename Begin>
Ticket CudaBackend::transfer(const Begin& begin) {
  auto transfer = std::make_unique<Transfer>(std::make_shared<Event>(device_, Waiting::sleeps));
  const Current current(*device_);
  const Result begun = begin();
  const Result recorded = transfer->end().record(copies_);
  if (recorded != success) device_->api().wait_stream(copies_.handle());
  transfer->become(begun != success ? begun : recorded);
  return Ticket(std::move(transfer));
}

// An event costs the engine of copies a tenth of what an expert takes, and so does a gap between copies that are not
// told together. So several copies are one call where the driver has it, and have one event.
Ticket CudaBackend::copy_all(std::span<const CopyArgs> copies) {
  const DriverApi& api = device_->api();
  std::vector<Address> to, from;
  std::vector<size_t> bytes;
  for (const CopyArgs& copy : copies) {
    if (copy.bytes == 0) continue;
    to.push_back(device_address(copy.to));
    from.push_back(device_address(copy.from));
    bytes.push_back(static_cast<size_t>(copy.bytes));
  }
  if (to.empty()) return {};
  return transfer([&] {
    if (to.size() > 1 && device_->chip().copies_together) {
      const CopyAttributes all = {.access_order = access_in_stream_order, .from = {}, .to = {}, .flags = 0};
      const size_t first = 0;
      return api.copy_batch(to.data(), from.data(), bytes.data(), to.size(), &all, &first, 1, copies_.handle());
    }
    Result begun = success;
    for (size_t i = 0; i < to.size() && begun == success; ++i)
      begun = api.copy(to[i], from[i], bytes[i], copies_.handle());
    return begun;
  });
}

Ticket CudaBackend::clear(View to, int64_t bytes) {
  if (bytes == 0) return {};
  return transfer(
      [&] { return device_->api().clear(device_address(to), 0, static_cast<size_t>(bytes), copies_.handle()); });
}

}  // namespace moeflux::cuda
