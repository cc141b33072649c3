#include "cuda/recording.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "cuda/cuda_backend.h"
#include "cuda/words.h"

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

Item Recording::item_of(const char* kernel, Extent grid, uint32_t threads, uint32_t shared_bytes,
                        std::span<const std::byte> params) {
  Item item = {.kernel = &backend_.kernels_.get(kernel, shared_bytes),
               .grid = grid,
               .threads = threads,
               .shared_bytes = shared_bytes,
               .params = static_cast<size_t>(aligned(std::ssize(work_.params))),
               .params_bytes = params.size()};
  work_.params.resize(item.params);
  work_.params.insert(work_.params.end(), params.begin(), params.end());
  return item;
}

void Recording::launch(const char* kernel, Extent grid, uint32_t threads, uint32_t shared_bytes,
                       std::span<const std::byte> params) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  work_.items.push_back(item_of(kernel, grid, threads, shared_bytes, params));
}

// Their words are taken from the host when the batch is submitted.
std::vector<Item> Recording::given(View from, View to, int64_t bytes) {
  constexpr int64_t most = most_given_words * word_bytes;
  std::vector<Item> items;
  for (int64_t at = 0; at < bytes; at += most) {
    const int64_t here = std::min(most, bytes - at);
    GivenWordsParams params = {};
    params.to = address<uint32_t>(to.at(at, 1));
    params.count = static_cast<uint32_t>(here / word_bytes);
    items.push_back(item_of("given_words", {1}, flat_threads, 0, std::as_bytes(std::span(&params, 1))));
    items.back().ends_first = items.back().brings = true;
    given_.push_back(
        {from.host<const std::byte>() + at, items.back().params + offsetof(GivenWordsParams, words), here});
  }
  return items;
}

// A few bytes of the host's come by launches, which wait for no engine of copies. They may be read by kernels before
// these wait for the one before them. Behind a hold the host may not have written them yet when the batch is submitted.
void Recording::copy(View from, View to, int64_t bytes) {
  if (bytes == 0) return;
  const bool from_host = from.buffer->memory() != Memory::device, to_host = to.buffer->memory() != Memory::device;
  const bool are_few = bytes <= most_crossing_bytes && bytes % word_bytes == 0;
  if (are_few && from_host && !to_host && !is_held_) {
    for (const Item& item : given(from, to, bytes)) work_.items.push_back(item);
    return;
  }
  work_.items.push_back({.kind = Item::Kind::copy,
                         .brings = from_host && !to_host,
                         .from = device_address(from),
                         .to = device_address(to),
                         .bytes = bytes});
}

List Recording::list(int64_t bytes) {
  bytes = aligned(std::max<int64_t>(1, bytes));
  if (lists_.empty() || lists_.back().used + bytes > lists_.back().bytes())
    lists_.push_back(backend_.take_lists(bytes));
  ListRoom& room = lists_.back();
  const int64_t begin = std::exchange(room.used, room.used + bytes);
  return {room.host->host() + begin, room.device->data() + begin};
}

void Recording::complete() {
  attempt([&] {
    std::vector<Item> items;
    for (const ListRoom& room : lists_) {
      const View from = {room.host.get(), 0}, to = {room.device.get(), 0};
      if (room.used <= most_crossing_bytes)
        std::ranges::copy(given(from, to, room.used), std::back_inserter(items));
      else
        items.push_back({.kind = Item::Kind::copy,
                         .brings = true,
                         .from = device_address(from),
                         .to = device_address(to),
                         .bytes = room.used});
    }
    const auto is_launch = [](const Item& item) { return item.kind == Item::Kind::launch; };
    work_.items.insert(std::ranges::find_if(work_.items, is_launch), items.begin(), items.end());
    for (const auto& [from, place, bytes] : given_)
      std::memcpy(work_.params.data() + place, from, static_cast<size_t>(bytes));
  });
}

View Recording::room(size_t which, int64_t bytes) { return backend_.room(which, bytes); }
int64_t Recording::room_limit(size_t which) const { return backend_.room_limit(which); }

const Chip& Recording::chip() const { return backend_.device_->chip(); }

void Recording::mark() {
  if (!error_) work_.items.push_back({.kind = Item::Kind::mark});
}

int64_t Recording::hold() {
  const int64_t number = ++backend_.last_hold_;
  is_held_ = true;
  if (!error_) work_.items.push_back({.kind = Item::Kind::hold, .number = number});
  return number;
}

void Recording::after(const Ticket& copy) {
  const Event* event = CudaBackend::end_of(copy);
  if (!event || error_) return;
  // Copies that began together have one event.
  const bool is_known = !work_.items.empty() && work_.items.back().event == event;
  if (!is_known) work_.items.push_back({.kind = Item::Kind::after, .event = event});
}

}  // namespace moeflux::cuda
