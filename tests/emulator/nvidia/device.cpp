#include "device.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>

namespace nvidia {
namespace {

constexpr uint64_t arena_bytes = uint64_t{1} << 38;  // addresses, not memory
constexpr uint64_t page = 4096;
constexpr int garbage = 0xA5;  // nobody may count on zeros

uint64_t pages(uint64_t bytes) { return (bytes + page - 1) / page * page; }

std::mutex streams_mutex;
std::set<Stream*> streams;
std::mutex report_mutex;
std::string report;
std::atomic<bool> broken = false;

}  // namespace

CudaEmulation& emulation() {
  static CudaEmulation now = {0, 0, -1, 0, "", -1, uint64_t{12} << 30, 13000, 1, 9, 0, 4, false, ""};
  return now;
}

void say_and_abort(const char* sentence) {
  std::fprintf(stderr, "emulated NVIDIA driver: %s\n", sentence);
  std::abort();
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

Memory& memory() {
  static Memory* all = new Memory();  // streams of a process that ends may still use it
  return *all;
}

void Memory::protect(int access) {
  if (top_ && mprotect(arena_, top_, access) != 0) say_and_abort("the system refused to open or close pages");
}

void Memory::open() {
  const std::lock_guard lock(mutex_);
  if (open_++ == 0) protect(PROT_READ | PROT_WRITE);
}

void Memory::close() {
  const std::lock_guard lock(mutex_);
  if (--open_ == 0) protect(PROT_NONE);
}

Result Memory::allocate(uint64_t* address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!arena_) {
    void* start = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) say_and_abort("the system refused addresses");
    arena_ = static_cast<std::byte*>(start);
  }
  if (used_ + pages(bytes) > emulation().memory) return out_of_memory;
  // The first gap that fits, with a page on either side that belongs to nobody.
  uint64_t at = page;
  for (const auto& [begin, size] : there_) {
    const uint64_t offset = begin - reinterpret_cast<uint64_t>(arena_);
    if (at + pages(bytes) + page <= offset) break;
    at = offset + pages(size) + page;
  }
  if (at + pages(bytes) + page > arena_bytes) return out_of_memory;
  std::byte* start = arena_ + at;
  top_ = std::max(top_, at + pages(bytes) + page);
  if (mprotect(start, pages(bytes), PROT_READ | PROT_WRITE) != 0) return out_of_memory;
  std::memset(start, garbage, bytes);
  if (!open_ && mprotect(start, pages(bytes), PROT_NONE) != 0) say_and_abort("the system refused to close pages");
  there_[reinterpret_cast<uint64_t>(start)] = bytes;
  used_ += pages(bytes);
  *address = reinterpret_cast<uint64_t>(start);
  return success;
}

Result Memory::free(uint64_t address) {
  wait_for_all_streams();  // as the driver does
  const std::lock_guard lock(mutex_);
  const auto found = there_.find(address);
  if (found == there_.end()) return invalid_value;
  used_ -= pages(found->second);
  madvise(reinterpret_cast<void*>(address), pages(found->second), MADV_DONTNEED);
  there_.erase(found);
  return success;
}

Result Memory::allocate_host(void** address, size_t bytes) {
  void* start = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return out_of_memory;
  std::memset(start, garbage, bytes);
  const std::lock_guard lock(mutex_);
  here_[reinterpret_cast<uint64_t>(start)] = bytes;
  *address = start;
  return success;
}

Result Memory::free_host(void* address) {
  wait_for_all_streams();
  const std::lock_guard lock(mutex_);
  const auto found = here_.find(reinterpret_cast<uint64_t>(address));
  if (found == here_.end()) return invalid_value;
  munmap(address, pages(found->second));
  here_.erase(found);
  return success;
}

Result Memory::pin(void* address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  return given_.emplace(reinterpret_cast<uint64_t>(address), bytes).second ? success : invalid_value;
}

// The driver does not say that it waits for streams.
Result Memory::unpin(void* address) {
  const std::lock_guard lock(mutex_);
  return given_.erase(reinterpret_cast<uint64_t>(address)) ? success : invalid_value;
}

uint64_t Memory::used() {
  const std::lock_guard lock(mutex_);
  return used_;
}

size_t Memory::count() {
  const std::lock_guard lock(mutex_);
  return there_.size() + here_.size() + given_.size();
}

bool Memory::holds(uint64_t address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto* all : {&there_, &here_, &given_}) {
    auto next = all->upper_bound(address);
    if (next == all->begin()) continue;
    --next;
    if (address + bytes <= next->first + next->second) return true;
  }
  return false;
}

std::vector<MslBuffer> Memory::all() {
  const std::lock_guard lock(mutex_);
  std::vector<MslBuffer> buffers;
  for (const auto* each : {&there_, &here_, &given_})
    for (const auto& [begin, bytes] : *each) buffers.push_back({reinterpret_cast<void*>(begin), bytes});
  std::ranges::sort(buffers, {}, &MslBuffer::data);
  return buffers;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

Result context_error() { return broken ? launch_failed : success; }

const char* context_report() {
  const std::lock_guard lock(report_mutex);
  return report.c_str();
}

void break_context(const std::string& words) {
  const std::lock_guard lock(report_mutex);
  if (!broken) report = "unspecified launch failure" + (words.empty() ? "" : ": " + words);
  broken = true;
}

void mend_context() { broken = false; }

Result run(const Launch& launch, Wait wait, void* previous) {
  const CudaEmulation& how = emulation();
  const Module& module = *launch.function->module;
  const bool checked =
      how.checked && module.checked && std::string_view(launch.function->kernel->name).starts_with(how.check_only);
  const MslOptions options = {how.order, checked, how.checked, true};
  const std::vector<MslBuffer> all = checked ? memory().all() : std::vector<MslBuffer>();
  if (module.launch(launch.function->kernel, launch.params.data(), all.data(), static_cast<uint32_t>(all.size()),
                    launch.grid, launch.block, launch.shared_bytes, &options, wait, previous) == 0)
    return success;
  break_context(std::string(launch.function->kernel->name) + ": " + module.report());
  return launch_failed;
}

Relay::Relay() {
  std::thread([this] { work(); }).detach();
}

bool Relay::begin(std::function<void(Wait, void*)> launch) {
  std::unique_lock lock(mutex_);
  launch_ = std::move(launch);
  next_may_come_ = true;  // if it ends without waiting
  state_ = State::running;
  changed_.notify_all();
  changed_.wait(lock, [this] { return state_ != State::running; });
  return next_may_come_;
}

void Relay::end() {
  std::unique_lock lock(mutex_);
  if (state_ == State::idle) return;
  state_ = State::running;
  changed_.notify_all();
  changed_.wait(lock, [this] { return state_ == State::idle; });
}

void Relay::rest(bool next_may_come) {
  std::unique_lock lock(mutex_);
  next_may_come_ = next_may_come;
  state_ = State::waiting;
  changed_.notify_all();
  changed_.wait(lock, [this] { return state_ == State::running; });
}

void Relay::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return state_ == State::running; });
    lock.unlock();
    launch_([](void* relay, bool next_may_come) { static_cast<Relay*>(relay)->rest(next_may_come); }, this);
    lock.lock();
    state_ = State::idle;
    changed_.notify_all();
  }
}

// ---- Streams --------------------------------------------------------------------------------------------------------

Stream::Stream() {
  const std::lock_guard lock(streams_mutex);
  streams.insert(this);
  thread_ = std::thread([this] { work(); });
}

Stream::~Stream() {
  wait();
  {
    const std::lock_guard lock(streams_mutex);
    streams.erase(this);
  }
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::add(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  changed_.notify_all();
}

void Stream::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return commands_.empty() && !busy_; });
}

void Stream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || !commands_.empty(); });
    if (commands_.empty()) return;
    busy_ = true;
    lock.unlock();
    if (emulation().delay) usleep(emulation().delay);
    memory().open();
    lock.lock();
    while (!commands_.empty()) {
      const std::function<void()> command = std::move(commands_.front());
      commands_.pop_front();
      lock.unlock();
      command();
      lock.lock();
    }
    lock.unlock();
    memory().close();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void wait_for_all_streams() {
  const std::lock_guard lock(streams_mutex);
  for (Stream* stream : streams) stream->wait();
}

}  // namespace nvidia
