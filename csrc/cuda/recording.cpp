#include "cuda/recording.h"

#include <algorithm>

#include "cuda/cuda_backend.h"

namespace moeflux::cuda {
namespace {

constexpr int64_t list_alignment = 16;

int64_t aligned(int64_t bytes) { return (bytes + list_alignment - 1) / list_alignment * list_alignment; }

}  // namespace

Recording::~Recording() {
  for (ListRoom& room : lists_) backend_.give_back(std::move(room));
}

void Recording::begin_op(const char* name) {
  if (backend_.ops_++ == backend_.fail_at_op_)
    throw DeviceError(concat("[", name, "] op ", backend_.fail_at_op_, " was told to fail"));
}

void Recording::launch(const char* kernel, Extent grid, uint32_t threads, uint32_t shared_bytes,
                       std::span<const std::byte> params) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  Item item = {.kernel = &backend_.kernels_.get(kernel, shared_bytes),
               .grid = grid,
               .threads = threads,
               .shared_bytes = shared_bytes,
               .params = static_cast<size_t>(aligned(std::ssize(work_.params))),
               .params_bytes = params.size()};
  work_.params.resize(item.params);
  work_.params.insert(work_.params.end(), params.begin(), params.end());
  work_.items.push_back(item);
}

void Recording::copy(View from, View to, int64_t bytes) {
  if (bytes == 0) return;
  work_.items.push_back(
      {.kind = Item::Kind::copy, .from = device_address(from), .to = device_address(to), .bytes = bytes});
}

List Recording::list(int64_t bytes) {
  bytes = aligned(std::max<int64_t>(1, bytes));
  if (lists_.empty() || lists_.back().used + bytes > lists_.back().bytes())
    lists_.push_back(backend_.take_lists(bytes));
  ListRoom& room = lists_.back();
  const int64_t begin = std::exchange(room.used, room.used + bytes);
  return {room.host->host() + begin, room.device->data() + begin};
}

View Recording::room(size_t which, int64_t bytes) { return backend_.room(which, bytes); }
int64_t Recording::room_limit(size_t which) const { return backend_.room_limit(which); }

const Chip& Recording::chip() const { return backend_.device_->chip(); }

void Recording::mark() {
  if (!error_) work_.items.push_back({.kind = Item::Kind::mark});
}

int64_t Recording::hold() {
  const int64_t number = ++backend_.last_hold_;
  if (!error_) work_.items.push_back({.kind = Item::Kind::hold, .number = number});
  return number;
}

void Recording::after(const Ticket& copy) {
  if (const Event* event = CudaBackend::end_of(copy); event && !error_)
    work_.items.push_back({.kind = Item::Kind::after, .event = event});
}

}  // namespace moeflux::cuda
