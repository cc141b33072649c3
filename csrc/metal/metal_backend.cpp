#include "metal/metal_backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/arena.h"
#include "core/error.h"
#include "core/mapping.h"
#include "core/text.h"
#include "metal/metal_commands.h"
#include "params.h"

namespace moeflux::metal {
namespace {

constexpr int64_t nothing_bytes = 16;
constexpr int64_t max_spans = 128;  // of one row, side by side: 32768 positions; more of them take further rounds

// A batch whose command buffers have departed up to `last`. `error` is set if recording it failed. `mark` is 0 if it
// has none.
class Departed final : public Ticket::State {
 public:
  Departed(std::shared_ptr<gpu::Flight> flight, std::shared_ptr<Event> marks)
      : flight_(std::move(flight)), marks_(std::move(marks)) {}

  void become(int64_t last, int64_t mark, std::exception_ptr error) {
    last_ = last;
    mark_ = mark;
    error_ = std::move(error);
  }

  void wait() override {
    flight_->wait(last_);
    if (error_) std::rethrow_exception(error_);
  }
  void reach() override {
    if (mark_ == 0 || error_) return wait();
    marks_->wait(static_cast<uint64_t>(mark_));
    flight_->check(last_);
  }
  bool done() const override { return flight_->arrived(last_); }

 private:
  std::shared_ptr<gpu::Flight> flight_;
  int64_t last_ = 0;
  std::shared_ptr<Event> marks_;
  int64_t mark_ = 0;
  std::exception_ptr error_;
};

}  // namespace

// ---- Memory ---------------------------------------------------------------------------------------------------------

MetalBackend::Room MetalBackend::Room::of(const WorkSizes& sizes) {
  Room room;
  const int64_t row = sizes.value_dim ? sizes.heads * (sizes.value_dim + 2) * 4 : 0;
  room.parts = row * max_spans;
  room.carried = row * std::min(max_carried, sizes.rows);
  const int64_t blocks = (sizes.logits + top_k_block - 1) / top_k_block;
  room.picks = blocks > 1 ? blocks * std::min(sizes.picks, sizes.logits) * 4 : 0;
  // There is room for two batches, so that one can be recorded while another runs.
  room.lists = 2 * MetalCommands::list_bytes(sizes.pairs, sizes.products);
  room.tables = 2 * sizes.row_blocks * static_cast<int64_t>(sizeof(RowBlock));
  room.chosen = sizes.rows ? sizes.pairs / sizes.rows : 0;
  return room;
}

int64_t MetalBackend::prepared_bytes(const WorkSizes& sizes) {
  const Room room = Room::of(sizes);
  int64_t bytes = 0;
  for (const int64_t part :
       {nothing_bytes, room.parts, room.carried, room.carried, room.picks, room.picks, room.picks, room.picks,
        room.lists, room.tables, room.chosen * int64_t{sizeof(ExpertBlock)}, room.chosen * 4})
    if (part > 0) bytes += arena_bytes(part);
  return bytes;
}

MetalBackend::MetalBackend(std::unique_ptr<Device> device, double max_work, int64_t fail_at_op)
    : device_(std::move(device)),
      pipelines_(*device_),
      max_work_(max_work),
      fail_at_op_(fail_at_op),
      marks_(device_->make_event()),
      released_(device_->make_event()),
      nothing_(allocate(nothing_bytes, Memory::device, "nothing")) {}

MetalBackend::~MetalBackend() {
  release(last_hold_);
  flight_->wait_for_all();
}

int64_t MetalBackend::max_bytes(const Device& device) {
  return static_cast<int64_t>(0.8 * static_cast<double>(device.working_set()));
}

int64_t MetalBackend::max_row_buffers() const { return row_buffers; }

std::shared_ptr<const void> MetalBackend::take(int64_t bytes, const std::string& what) {
  const int64_t taken = arena_bytes(bytes);
  const int64_t limit = max_bytes(*device_);
  if (taken > limit - *held_)
    throw BudgetError(concat(what, ": expected at most ", sized(std::max<int64_t>(0, limit - *held_)),
                             ", which is left of the ", sized(limit), " that ", device_->name(), " may use, found ",
                             sized(taken), ": load with less `memory` or fewer `expert_slots`, or backend=\"cpu\""),
                      taken - (limit - *held_));
  *held_ += taken;
  return {nullptr, [held = held_, taken](const void*) { *held -= taken; }};
}

std::unique_ptr<Buffer> MetalBackend::allocate(int64_t bytes, Memory memory, const std::string& what) {
  std::shared_ptr<const void> taken = take(bytes, what);
  std::unique_ptr<DeviceBuffer> buffer = device_->allocate(bytes, memory, what);
  buffer->kept = std::move(taken);
  return buffer;
}

std::unique_ptr<Buffer> MetalBackend::map(const File& file, int64_t begin, int64_t bytes, const std::string& what) {
  std::shared_ptr<const void> taken = take(bytes, what);
  const auto pages = std::make_shared<Mapping>(file, begin, bytes);
  std::unique_ptr<DeviceBuffer> buffer =
      device_->wrap({pages->data(), static_cast<size_t>(pages->bytes())}, pages, what);
  if (buffer) buffer->kept = std::move(taken);
  return buffer;
}

int64_t MetalBackend::prepare(const WorkSizes& sizes) {
  const int64_t before = held() - arena_bytes(nothing_bytes);
  const Room room = Room::of(sizes);
  if (room.parts) parts_ = allocate(room.parts, Memory::device, "attention");
  reserve_carried(room.carried);
  for (auto& round : picks_)
    for (std::unique_ptr<Buffer>& picks : round)
      if (room.picks) picks = allocate(room.picks, Memory::device, "top-k");
  if (room.lists) lists_.reserve(*this, room.lists);
  if (room.tables) tables_.reserve(*this, room.tables);
  if (room.chosen) {
    chosen_blocks_ = allocate(room.chosen * int64_t{sizeof(ExpertBlock)}, Memory::device, "chosen experts");
    chosen_pairs_ = allocate(room.chosen * 4, Memory::device, "chosen experts");
  }
  // So whoever opens a model waits for the compiler, and no step does.
  pipelines_.make_all(sizes.has_blocks);
  return held() - before;
}

void MetalBackend::reserve_carried(int64_t bytes) {
  for (std::unique_ptr<Buffer>& carried : carried_)
    if (bytes > (carried ? carried->bytes() : 0)) carried = allocate(bytes, Memory::device, "attention");
}

// ---- Batches --------------------------------------------------------------------------------------------------------

std::unique_ptr<Commands> MetalBackend::begin() {
  if (flight_->heal()) device_->renew_queue();
  return std::make_unique<MetalCommands>(*this);
}

Ticket MetalBackend::submit(std::unique_ptr<Commands> commands) {
  auto& batch = static_cast<MetalCommands&>(*commands);
  auto departed = std::make_unique<Departed>(flight_, marks_);  // first: so what departs has a ticket, whatever fails
  batch.commit();
  std::exception_ptr error = batch.take_error();
  if (!error && batch.last() == 0) return {};
  departed->become(batch.last(), batch.marked(), std::move(error));
  batch.submitted();
  return Ticket(std::move(departed));
}

}  // namespace moeflux::metal
