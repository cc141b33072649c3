// A batch as it was recorded: what is to be launched, copied and waited for, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace moeflux::cuda {

inline Address device_address(View view) { return reinterpret_cast<Address>(view.bytes()); }

struct Item {
  enum class Kind { launch, copy, mark, hold, after };

  Kind kind = Kind::launch;
  // A launch:
  Kernel* kernel = nullptr;
  Extent grid{};
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
  size_t params = 0;  // where they begin
  size_t params_bytes = 0;
  // Before any launch behind it begins. So it is in no graph: in a chain of programmatic edges an ordinary one holds
  // nobody up (on an H100 with driver 580).
  bool ends_first = false;
  // Whether all that it does is to bring what the host has.
  bool brings = false;
  // A copy:
  Address from = 0;
  Address to = 0;
  int64_t bytes = 0;
  // A hold:
  int64_t number = 0;
  // What waits for an event, which is borrowed until the batch is launched:
  const Event* event = nullptr;
};

struct Work {
  std::vector<Item> items;
  std::vector<std::byte> params;

  const std::byte* params_of(const Item& item) const { return params.data() + item.params; }
};

}  // namespace moeflux::cuda
