#include "cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <limits>
#include <stdexcept>
#include <utility>

#include "core/arena.h"
#include "core/error.h"
#include "core/text.h"
#include "cuda/cuda_commands.h"
#include "cuda/model_units.h"

namespace moeflux::cuda {

// What became of a batch: it was launched as number `last`, or not at all, and then `error` says why. `mark` is null if
// it has none.
struct Fate {
  bool is_known = false;
  int64_t last = 0;
  std::shared_ptr<Event> mark{};
  std::exception_ptr error{};
};

namespace {

constexpr int64_t least_lists = 1 << 16;
constexpr int64_t least_margin = int64_t{256} << 20;
constexpr int64_t batches_ahead = 2;  // of a step that is recorded before the call that wants it

// The ticket of a batch.
class Departed final : public Ticket::State {
 public:
  Departed(std::shared_ptr<Flights> flights, std::shared_ptr<Fate> fate)
      : flights_(std::move(flights)), fate_(std::move(fate)) {}

  void wait() override {
    if (!fate_->is_known) throw std::logic_error("cuda: expected a batch that does not hold, found one that does");
    if (fate_->last) flights_->wait(fate_->last);
    if (fate_->error) std::rethrow_exception(fate_->error);
  }
  void reach() override {
    if (!fate_->mark || fate_->error || fate_->mark->wait() != success) return wait();
    flights_->check(fate_->last);
  }
  bool done() const override { return fate_->is_known && (fate_->last == 0 || flights_->arrived(fate_->last)); }

 private:
  std::shared_ptr<Flights> flights_;
  std::shared_ptr<Fate> fate_;
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
  size_t launched = 0;                             // items, the first ones
  std::deque<std::optional<Graphs::Told>> told{};  // of the next stretches, if it is settled
};

// A batch that was submitted. It holds if not all of it was launched at once.
struct CudaBackend::Submitted {
  std::unique_ptr<Batch> batch;
  std::shared_ptr<Event> end;
  std::shared_ptr<Fate> fate;
  std::shared_ptr<const void> kept;
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
      spare_(std::make_shared<Spare>()) {}

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
  return (sizes.batches + batches_ahead) * lists;
}

int64_t CudaBackend::prepared_bytes(const WorkSizes& sizes) {
  // Host and device each have room for lists.
  int64_t bytes = 2 * prepared_host_bytes(sizes);
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
  const int64_t before = held();
  const std::vector<RoomSize> rooms = CudaCommands::rooms(sizes);
  rooms_.resize(rooms.size());
  is_prepared_ = true;
  kernels_.load(units_for(sizes, {}));
  if (sizes.key_dim > 0 && room_behind(1, sizes.delta_head, sizes.key_dim) > 0)
    complete_ = &kernels_.get("delta_complete", 0);
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
  for (; batch.launched < items.size() && items[batch.launched].brings; ++batch.launched)
    run(items[batch.launched], work, nullptr);
  for (size_t next = batch.launched; next < items.size();) {
    const size_t stretch = stretch_of(items.subspan(next));
    if (stretch) batch.told.push_back(graphs_.tell(items.subspan(next, stretch), work));
    next += std::max<size_t>(1, stretch);
  }
}

Ticket CudaBackend::submit(std::unique_ptr<Commands> commands) {
  std::unique_ptr<Batch> batch(static_cast<Batch*>(commands.release()));
  Recording& recording = batch->recording;
  if (!batch->is_settled) {
    batch->end();
    recording.complete();
  }
  std::exception_ptr error = recording.take_error();
  const std::vector<Item>& items = recording.work().items;
  if (!error && items.empty()) return {};
  // First: so what departs has a ticket, whatever fails.
  const auto fate = std::make_shared<Fate>();
  auto ticket = std::make_unique<Departed>(flights_, fate);
  if (error) {
    *fate = {.is_known = true, .error = std::move(error)};
    return Ticket(std::move(ticket));
  }
  const auto end = std::make_shared<Event>(device_, Waiting::spins);
  const auto is_mark = [](const Item& item) { return item.kind == Item::Kind::mark; };
  if (std::ranges::any_of(items, is_mark)) fate->mark = std::make_shared<Event>(device_, Waiting::spins);
  const auto lists = std::make_shared<std::vector<ListRoom>>(std::move(recording.lists()));
  const std::shared_ptr<const void> kept(nullptr, [lists, spare = spare_](const void*) {
    for (ListRoom& room : *lists) spare->add(std::move(room));
  });
  submitted_.push_back({std::move(batch), end, fate, kept});
  launch_submitted();
  return Ticket(std::move(ticket));
}

// Launches what was submitted, in order, up to the first batch that holds. That one goes on from there next time.
void CudaBackend::launch_submitted() {
  for (; !submitted_.empty(); submitted_.pop_front()) {
    const Submitted& first = submitted_.front();
    Fate& fate = *first.fate;
    try {
      if (!run(*first.batch, fate.mark.get())) return;
    } catch (...) {
      fate.error = std::current_exception();
    }
    try {
      if (const Result result = first.end->record(batches_); result != success) throw DeviceError(failure_of(result));
      fate.last = flights_->depart(first.end, first.kept);
    } catch (...) {  // nobody can wait for an event, so all that was launched must end here
      if (!fate.error) fate.error = std::current_exception();
      const Current current(*device_);
      device_->api().wait_stream(batches_.handle());
    }
    fate.is_known = true;
  }
}

// Launches what is left of a batch. False if it holds.
bool CudaBackend::run(Batch& batch, Event* mark) {
  const Current current(*device_);
  const Work& work = batch.recording.work();
  for (size_t& next = batch.launched; next < work.items.size();) {
    const std::span<const Item> left = std::span(work.items).subspan(next);
    if (left.front().kind == Item::Kind::hold && left.front().number > released_) return false;
    const std::span<const Item> stretch = left.first(stretch_of(left));
    if (stretch.empty()) {
      run(work.items[next++], work, mark);
      continue;
    }
    std::optional<Graphs::Told> told;
    if (batch.is_settled) {
      told = std::move(batch.told.front());
      batch.told.pop_front();
    } else {
      told = graphs_.tell(stretch, work);
    }
    // Since the batch was settled, the graph may have been told another.
    while (told && !graphs_.launch(*told, batches_)) told = graphs_.tell(stretch, work);
    if (!told)
      for (const Item& item : stretch) run(item, work, nullptr);
    next += stretch.size();
  }
  return true;
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
      return;  // it was released
    case Item::Kind::after:
      return check(item.event->hold(batches_), "cuda: cuStreamWaitEvent");
  }
}

void CudaBackend::release(int64_t number) {
  released_ = std::max(released_, number);
  launch_submitted();
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

int64_t CudaBackend::room_behind(int64_t heads, int64_t rows, int64_t columns) {
  return rows == part_columns && columns == part_columns ? heads * int64_t{sizeof(PendingTokens)} : 0;
}

Ticket CudaBackend::complete(View state, int64_t heads) {
  CompleteParams params = {.state = address<float>(state), .heads = static_cast<uint32_t>(heads), .nothing = 0};
  void* given = &params;
  return transfer([&] {
    return device_->api().launch(complete_->function, params.heads, 1, 1, step_threads, 1, 1, complete_->shared_bytes,
                                 copies_.handle(), &given, nullptr);
  });
}

Ticket CudaBackend::clear(View to, int64_t bytes) {
  if (bytes == 0) return {};
  return transfer(
      [&] { return device_->api().clear(device_address(to), 0, static_cast<size_t>(bytes), copies_.handle()); });
}

}  // namespace moeflux::cuda
