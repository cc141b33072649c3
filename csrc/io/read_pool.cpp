#include "io/read_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/forks.h"
#include "core/pause.h"

namespace moeflux {

using Clock = std::chrono::steady_clock;

template <typename Body>
static std::exception_ptr error_of(const Body& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return {};
}

// Where bytes are carried on, a device computes, and cores are idle. So threads that have read look out for a while
// before they sleep, and so does who waits for them: to wake a thread takes tens of microseconds, and there is a pause
// in each layer of a step. They leave their core to others. In an engine that computes nothing, or reads nothing, all
// sleep.
constexpr auto patience = std::chrono::microseconds(400);

template <typename Ready>
static void look_out(const Ready& ready) {
  const Clock::time_point end = Clock::now() + patience;
  while (!ready() && Clock::now() < end) {
    for (int i = 0; i < 32 && !ready(); ++i) pause();
    std::this_thread::yield();
  }
}

constexpr size_t default_requests = 36;  // nine pieces of an expert, each read in four parts

// What threads and batches share. It lives as long as the last of them.
struct ReadQueue {
  struct List {
    ReadBatch* first = nullptr;
    ReadBatch* last = nullptr;
  };

  // Of a thread that reads: one half is read into while what was read before leaves the other.
  class Room {
   public:
    struct Half {
      std::span<std::byte> memory;
      std::shared_ptr<Carried> leaving;
      bool is_own = false;  // of the request that is being read; otherwise its batch waits for it, too
    };

    explicit Room(std::span<std::byte> memory) {
      const size_t half = memory.size() / halves_.size();
      for (size_t i = 0; i < halves_.size(); ++i) halves_[i].memory = memory.subspan(i * half, half);
    }

    void begin_request() {
      for (Half& half : halves_) half.is_own = false;
    }
    // The half to read into, when nothing leaves it any more. Throws what went wrong with this request.
    Half& next() {
      Half& half = halves_[turn_];
      turn_ = (turn_ + 1) % halves_.size();
      empty(half);
      return half;
    }
    static void leave(Half& half, std::shared_ptr<Carried> leaving) {
      half.leaving = std::move(leaving);
      half.is_own = true;
    }
    // Returns when all of this request has left. Throws what went wrong.
    void arrive() {
      for (Half& half : halves_)
        if (half.is_own) empty(half);
    }
    // What of this request is still leaving.
    void list_leaving(std::vector<std::shared_ptr<Carried>>& list) const {
      for (const Half& half : halves_)
        if (half.is_own && half.leaving) list.push_back(half.leaving);
    }

   private:
    static void empty(Half& half) {
      const std::shared_ptr<Carried> leaving = std::exchange(half.leaving, {});
      if (!leaving) return;
      std::exception_ptr error = error_of([&] { leaving->wait(); });
      if (error && half.is_own) std::rethrow_exception(std::move(error));
    }

    std::array<Half, ReadBatch::halves> halves_;
    size_t turn_ = 0;
  };

  // Condition variables and threads do not survive a fork: in the child nothing here may be touched.
  const int64_t forks_before = forks();
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable finished;
  List lists[2];  // by priority: batches with requests that have not begun
  Carry carry;
  bool closing = false;
  std::atomic<int> queued = 0;  // batches in the lists
  int asleep = 0;               // threads
  int active = 0;
  Clock::time_point busy_since;
  ReadPoolStats stats;

  bool forked() const { return forks() != forks_before; }

  List& list_of(const ReadBatch& batch) { return lists[static_cast<size_t>(batch.priority_)]; }

  ReadBatch* next() const { return lists[0].first ? lists[0].first : lists[1].first; }

  void link(ReadBatch& batch) {
    List& list = list_of(batch);
    batch.before_ = list.last;
    batch.after_ = nullptr;
    (list.last ? list.last->after_ : list.first) = &batch;
    list.last = &batch;
    batch.queued_ = true;
    ++queued;
  }

  void unlink(ReadBatch& batch) {
    List& list = list_of(batch);
    (batch.before_ ? batch.before_->after_ : list.first) = batch.after_;
    (batch.after_ ? batch.after_->before_ : list.last) = batch.before_;
    batch.queued_ = false;
    --queued;
  }

  void say_if_over(ReadBatch& batch) {
    if (!over(batch)) return;
    batch.is_over_ = true;
    finished.notify_all();
  }

  static bool over(const ReadBatch& batch) { return batch.begun_ == batch.requests_.size() && batch.running_ == 0; }

  // Drops what has not begun.
  void give_up(ReadBatch& batch) {
    if (!batch.queued_) return;
    unlink(batch);
    batch.begun_ = batch.requests_.size();
  }

  int64_t cancel(ReadBatch& batch) {
    if (!batch.queued_) return 0;
    int64_t dropped = 0;
    for (size_t i = batch.begun_; i < batch.requests_.size(); ++i) dropped += batch.requests_[i].bytes();
    give_up(batch);
    batch.cancelled_ = true;
    say_if_over(batch);
    return dropped;
  }

  size_t begin(ReadBatch& batch) {
    const size_t index = batch.begun_++;
    ++batch.running_;
    if (batch.begun_ == batch.requests_.size()) unlink(batch);
    if (active++ == 0) busy_since = Clock::now();
    return index;
  }

  // After its last request, a batch belongs to whoever waited for it.
  void end(ReadBatch& batch, size_t index, std::exception_ptr error) {
    if (--active == 0) stats.busy_seconds += std::chrono::duration<double>(Clock::now() - busy_since).count();
    const bool demand = batch.priority_ == ReadPriority::demand;
    (demand ? stats.demand_reads : stats.look_ahead_reads) += 1;
    (demand ? stats.demand_bytes : stats.look_ahead_bytes) += batch.requests_[index].bytes();
    if (error) {
      give_up(batch);
      if (!batch.error_ || index < batch.error_index_) {
        batch.error_ = std::move(error);
        batch.error_index_ = index;
      }
    }
    --batch.running_;
    say_if_over(batch);
  }

  // Whether the request that is about to end is the batch's last and all went well.
  static bool complete_but_for_one(const ReadBatch& batch) {
    return batch.begun_ == batch.requests_.size() && batch.running_ == 1 && !batch.error_ && !batch.cancelled_;
  }

  void read(const ReadRequest& request, std::span<std::byte> bounce, Room& room) const {
    if (request.row) return read_turns(request, bounce, room);
    if (!request.into.is_carried()) return request.reader->read(request.offset, request.into.memory(), bounce);
    for (int64_t done = 0; done < request.into.bytes();) {
      Room::Half& half = room.next();
      const int64_t bytes = std::min(static_cast<int64_t>(half.memory.size()), request.into.bytes() - done);
      const std::span<std::byte> part = half.memory.first(static_cast<size_t>(bytes));
      request.reader->read(request.offset + done, part, bounce);
      room.leave(half, carry(part, request.into.place() + done));
      done += bytes;
    }
  }

  void read_turns(const ReadRequest& request, std::span<std::byte> bounce, Room& room) const {
    const std::span<std::byte> turns = bounce.first(turns_bytes);
    const int64_t most = turns_bytes / (2 * request.row) * request.row;  // of one matrix
    for (int64_t done = 0; done < request.into.bytes();) {
      const int64_t bytes = std::min(most, request.into.bytes() - done);
      const std::span<std::byte> part = turns.first(static_cast<size_t>(2 * bytes));
      request.reader->read(request.offset + 2 * done, part, bounce.subspan(turns_bytes));
      for (const int64_t second : {0, 1}) {
        const Landing into = request.into.part(done + second * request.apart, bytes);
        const std::span<std::byte> rows = part.subspan(static_cast<size_t>(second * request.row));
        if (!into.is_carried()) {
          take_rows(rows, request.row, into.memory());
          continue;
        }
        Room::Half& half = room.next();
        const std::span<std::byte> own = half.memory.first(static_cast<size_t>(bytes));
        take_rows(rows, request.row, own);
        room.leave(half, carry(own, into.place()));
      }
      done += bytes;
    }
  }

  // Every second row, from the first on.
  static void take_rows(std::span<const std::byte> rows, int64_t row, std::span<std::byte> own) {
    const auto bytes = static_cast<size_t>(row);
    for (size_t done = 0; done < own.size(); done += bytes)
      std::memcpy(own.data() + done, rows.data() + 2 * done, bytes);
  }

  void run(std::span<std::byte> bounce, std::span<std::byte> memory) {
    Room room(memory);
    std::unique_lock lock(mutex);
    for (;;) {
      if (carry && !closing && !next()) {
        lock.unlock();
        look_out([&] { return queued > 0; });
        lock.lock();
      }
      ++asleep;
      work.wait(lock, [&] { return closing || next(); });
      --asleep;
      ReadBatch* batch = next();
      if (!batch) return;
      const size_t index = begin(*batch);
      const ReadRequest request = batch->requests_[index];
      const bool is_checked = batch->after_reading_ != nullptr;
      lock.unlock();
      room.begin_request();
      std::exception_ptr error = error_of([&] {
        read(request, bounce, room);
        if (is_checked) room.arrive();
      });
      lock.lock();
      room.list_leaving(batch->carried_);
      if (!error && batch->after_reading_ && complete_but_for_one(*batch)) {
        lock.unlock();
        error = error_of(batch->after_reading_);
        lock.lock();
      }
      end(*batch, index, std::move(error));
    }
  }
};

// ---- ReadBatch -------------------------------------------------------------------------------------------------

ReadBatch::~ReadBatch() {
  if (!queue_ || queue_->forked()) return;
  {
    std::unique_lock lock(queue_->mutex);
    queue_->cancel(*this);
    queue_->finished.wait(lock, [&] { return ReadQueue::over(*this); });
  }
  arrive();
}

void ReadBatch::reserve(size_t requests) {
  requests_.reserve(requests);
  carried_.reserve(halves * requests);
}

// Waits for what is being carried. Returns what went wrong first.
std::exception_ptr ReadBatch::arrive() {
  std::exception_ptr first;
  for (const std::shared_ptr<Carried>& each : carried_)
    if (std::exception_ptr error = error_of([&] { each->wait(); }); error && !first) first = std::move(error);
  carried_.clear();
  return first;
}

void ReadBatch::add(const ReadRequest& request) {
  if (queue_) throw StateError("[ReadBatch] add: expected a batch that is not submitted, found one that is");
  if (requests_.capacity() == 0) reserve(default_requests);  // so that a later, larger use allocates nothing
  requests_.push_back(request);
}

void ReadBatch::clear() {
  if (queue_) throw StateError("[ReadBatch] clear: expected a batch that is not submitted, found one that is");
  requests_.clear();
}

bool ReadBatch::wait() {
  if (!queue_) {
    requests_.clear();
    return true;
  }
  if (queue_->forked()) throw StateError("[ReadBatch] wait: expected the process that submitted it, found a fork");
  if (queue_->carry) look_out([&] { return is_over_.load(); });
  {
    std::unique_lock lock(queue_->mutex);
    queue_->finished.wait(lock, [&] { return ReadQueue::over(*this); });
  }
  queue_.reset();
  requests_.clear();
  begun_ = 0;
  const bool complete = !std::exchange(cancelled_, false);
  const std::exception_ptr not_carried = arrive();
  if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(std::move(error));
  if (not_carried) std::rethrow_exception(not_carried);
  return complete;
}

bool ReadBatch::done() const {
  if (!queue_ || queue_->forked()) return true;
  {
    const std::lock_guard lock(queue_->mutex);
    if (!ReadQueue::over(*this)) return false;
  }
  return std::ranges::all_of(carried_, [](const std::shared_ptr<Carried>& each) { return each->done(); });
}

int64_t ReadBatch::cancel() {
  if (!queue_ || queue_->forked()) return 0;
  const std::lock_guard lock(queue_->mutex);
  return queue_->cancel(*this);
}

void ReadBatch::promote() {
  if (!queue_ || queue_->forked()) return;
  const std::lock_guard lock(queue_->mutex);
  if (priority_ == ReadPriority::demand) return;
  if (queued_) queue_->unlink(*this);
  priority_ = ReadPriority::demand;
  if (begun_ < requests_.size()) queue_->link(*this);
}

// ---- ReadPool --------------------------------------------------------------------------------------------------

void ReadPool::FreeAligned::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t{direct_alignment});
}

ReadPool::ReadPool(int threads, int64_t bounce, std::span<std::byte> rooms, Carry carry) : bounce_each_(bounce) {
  assert(threads > 0 && bounce >= 0 && bounce % direct_alignment == 0);
  assert(!carry || static_cast<int64_t>(rooms.size()) >= threads * staging_bytes);
  queue_ = std::make_shared<ReadQueue>();
  queue_->carry = std::move(carry);
  if (bounce > 0) {
    const auto bytes = static_cast<size_t>(threads) * static_cast<size_t>(bounce);
    bounce_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{direct_alignment})));
  }
  try {
    start(threads, rooms);
  } catch (...) {
    stop();
    throw;
  }
}

void ReadPool::start(int count, std::span<std::byte> rooms) {
  threads_.reserve(static_cast<size_t>(count));
  // Signals are for the threads of the application. One that arrives here would only interrupt a read.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 0; i < count; ++i) {
      const auto size = static_cast<size_t>(bounce_each_);
      const std::span<std::byte> own(bounce_ ? bounce_.get() + static_cast<size_t>(i) * size : nullptr, size);
      const auto each = static_cast<size_t>(staging_bytes);
      const std::span<std::byte> room = rooms.empty() ? rooms : rooms.subspan(static_cast<size_t>(i) * each, each);
      threads_.start([queue = queue_, own, room] { queue->run(own, room); });
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ReadPool::stop() {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->closing = true;
    while (ReadBatch* guess = queue_->lists[static_cast<size_t>(ReadPriority::look_ahead)].first)
      queue_->cancel(*guess);
  }
  queue_->work.notify_all();
  threads_.join();
}

ReadPool::~ReadPool() {
  if (!queue_->forked()) {
    stop();
    return;
  }
  // The threads are the parent's. Destroying what they wait on would wait for them, so it is leaked.
  threads_.detach();
  static_cast<void>(new std::shared_ptr<ReadQueue>(std::move(queue_)));
}

void ReadPool::submit(ReadBatch& batch, ReadPriority priority) {
  if (batch.queue_) throw StateError("[ReadPool] submit: expected a batch that is not submitted, found one that is");
  if (queue_->forked()) throw StateError("[ReadPool] submit: expected the process that opened the model, found a fork");
  if (batch.requests_.empty()) return;
  const size_t count = batch.requests_.size();
  {
    const std::lock_guard lock(queue_->mutex);
    batch.queue_ = queue_;
    batch.priority_ = priority;
    batch.begun_ = 0;
    batch.is_over_ = false;
    queue_->link(batch);
    if (queue_->asleep == 0) return;
  }
  if (count == 1)
    queue_->work.notify_one();
  else
    queue_->work.notify_all();
}

ReadPoolStats ReadPool::stats() const {
  if (queue_->forked()) return {};
  const std::lock_guard lock(queue_->mutex);
  ReadPoolStats stats = queue_->stats;
  if (queue_->active > 0)
    stats.busy_seconds += std::chrono::duration<double>(Clock::now() - queue_->busy_since).count();
  return stats;
}

}  // namespace moeflux
