// A batch that is being recorded. Nothing runs before it is submitted.
#pragma once

#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cuda/launches.h"
#include "cuda/work.h"

namespace moeflux::cuda {

class CudaBackend;

// Room for lists: where the host writes them, and where they are copied to before the batch runs.
struct ListRoom {
  std::unique_ptr<Buffer> host;
  std::unique_ptr<Buffer> device;
  int64_t used = 0;

  int64_t bytes() const { return device->bytes(); }
};

class Recording final : public Launches {
 public:
  explicit Recording(CudaBackend& backend) : backend_(backend) {}
  ~Recording() override;

  using Launches::launch;
  void launch(const char* kernel, Extent grid, uint32_t threads, uint32_t shared_bytes,
              std::span<const std::byte> params) override;
  void copy(View from, View to, int64_t bytes) override;
  List list(int64_t bytes) override;
  View room(size_t which, int64_t bytes) override;
  int64_t room_limit(size_t which) const override;
  const Chip& chip() const override;
  void mark() override;
  int64_t hold() override;
  bool is_held() const override { return is_held_; }
  void after(const Ticket& copy) override;

  // Takes what the host has written in lists and for copies, and brings lists before the first launch. Nothing is
  // recorded after this.
  void complete();
  const Work& work() const { return work_; }
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }
  std::vector<ListRoom>& lists() { return lists_; }

 private:
  void begin_op(const char* name) override;
  Item item_of(const char* kernel, Extent grid, uint32_t threads, uint32_t shared_bytes,
               std::span<const std::byte> params);
  std::vector<Item> given(View from, View to, int64_t bytes);

  // Words of the host that become arguments.
  struct Given {
    const std::byte* from;
    size_t place;
    int64_t bytes;
  };

  CudaBackend& backend_;
  Work work_;
  bool is_held_ = false;
  std::vector<ListRoom> lists_;
  std::vector<Given> given_;
};

// A base, for whoever has another base that borrows the recording.
struct HasRecording {
  Recording recording;
};

}  // namespace moeflux::cuda
