// Threads that fill memory from files.
//
// A ReadBatch is a handful of reads that are waited for together, usually the pieces of one expert. It owns neither
// readers nor destinations; both must stay until `wait` has returned or the batch is gone. Batch and pool may go in
// either order. Each waits for the reads that have begun.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/threads.h"
#include "io/landing.h"
#include "io/reader.h"

namespace moeflux {

struct ReadRequest {
  Reader* reader = nullptr;
  int64_t offset = 0;
  Landing into;
  // Where rows of two matrices alternate: the bytes of a row, of which turns_bytes have two, and from `into` to where
  // the second matrix's rows land. `into` is for those of the first, and there are as many of both.
  int64_t row = 0;
  int64_t apart = 0;

  int64_t bytes() const { return row ? 2 * into.bytes() : into.bytes(); }
};

// Bytes that were read, on their way to a place that no read reaches. Several threads may ask at once.
class Carried {
 public:
  virtual ~Carried() = default;
  virtual bool done() const = 0;
  virtual void wait() = 0;  // throws on every call what went wrong
};

// Begins to take bytes there. They stay until what it returns is done. Several threads that read may call it at once.
using Carry = std::function<std::shared_ptr<Carried>(std::span<const std::byte> bytes, int64_t place)>;

// No look-ahead read begins while a demanded one is queued.
enum class ReadPriority { demand, look_ahead };

struct ReadPoolStats {
  int64_t demand_reads = 0;
  int64_t demand_bytes = 0;
  int64_t look_ahead_reads = 0;
  int64_t look_ahead_bytes = 0;
  double busy_seconds = 0;  // with at least one read under way; the rest of the wall time the SSD was idle
};

struct ReadQueue;

// A thread that reads goes on to the next request while the last bytes of this one are carried. So a batch whose
// requests have ended may still wait for some of its bytes.
//
// It is used by one thread at a time, and so are the calls of the pool that take it. It keeps its memory: once it has
// reached its largest size, it allocates nothing.
class ReadBatch {
 public:
  ReadBatch() = default;
  ~ReadBatch();  // drops what has not begun, and waits for the rest
  ReadBatch(const ReadBatch&) = delete;
  ReadBatch& operator=(const ReadBatch&) = delete;

  void add(const ReadRequest& request);  // only before it is submitted
  void clear();                          // likewise
  void reserve(size_t requests);
  size_t capacity() const { return requests_.capacity(); }
  // From now on, the thread that ends the last request of a use calls `check`, if all was read and carried. What it
  // throws is the batch's error.
  void after_reading(std::function<void()> check) { after_reading_ = std::move(check); }
  size_t size() const { return requests_.size(); }
  // Bytes of its lists with room for so many requests.
  static int64_t planned_tables(size_t requests) {
    return static_cast<int64_t>(requests * (sizeof(ReadRequest) + halves * sizeof(std::shared_ptr<Carried>)));
  }

  // Returns when no thread touches a destination any more, and empties the batch for its next use. True when everything
  // was read, false when `cancel` dropped something. Throws the error of the first request that failed; the requests
  // after it may have been skipped.
  [[nodiscard]] bool wait();
  // Whether `wait` would return at once.
  bool done() const;
  // Drops the requests that have not begun. Returns their bytes.
  int64_t cancel();
  // Moves the batch from look-ahead to demand, after what is demanded already.
  void promote();

 private:
  friend class ReadPool;
  friend struct ReadQueue;

  static constexpr size_t halves = 2;  // of a thread's room: from each of them, bytes of a request may be carried

  std::exception_ptr arrive();

  std::vector<ReadRequest> requests_;
  std::function<void()> after_reading_;
  std::shared_ptr<ReadQueue> queue_;  // set while submitted

  // Under the queue's mutex.
  ReadPriority priority_ = ReadPriority::demand;
  ReadBatch* before_ = nullptr;
  ReadBatch* after_ = nullptr;
  bool queued_ = false;
  bool cancelled_ = false;
  size_t begun_ = 0;    // requests handed out, or given up
  size_t running_ = 0;  // how many of them are being read now
  size_t error_index_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> is_over_ = false;              // for who looks out; set once all requests have ended
  std::vector<std::shared_ptr<Carried>> carried_;  // what was on its way when its request ended
};

class ReadPool {
 public:
  // Each thread has a bounce buffer of `bounce` bytes, a multiple of direct_alignment or 0. What is to be carried is
  // read into `rooms`, staging_bytes a thread, which must outlive the pool. IoError when the system refuses so many
  // threads.
  explicit ReadPool(int threads, int64_t bounce = 0, std::span<std::byte> rooms = {}, Carry carry = {});
  // Finishes demanded reads, and drops look-ahead reads that have not begun.
  ~ReadPool();
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  // StateError when the batch is submitted already, or in a forked process, which has no threads of ours.
  void submit(ReadBatch& batch, ReadPriority priority = ReadPriority::demand);

  int threads() const { return static_cast<int>(threads_.size()); }
  int64_t memory() const { return static_cast<int64_t>(threads_.size()) * bounce_each_; }
  ReadPoolStats stats() const;

 private:
  struct FreeAligned {
    void operator()(std::byte* memory) const;
  };

  void start(int count, std::span<std::byte> rooms);
  void stop();

  int64_t bounce_each_;
  std::unique_ptr<std::byte, FreeAligned> bounce_;  // of all threads
  std::shared_ptr<ReadQueue> queue_;
  Threads threads_{"that read"};
};

}  // namespace moeflux
