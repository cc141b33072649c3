// The emulated device behind the stand-in's calls: memory that the host cannot touch, and streams that are late.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../runtime/abi.h"
#include "nvidia.h"

namespace nvidia {

using Result = int;
constexpr Result success = 0, invalid_value = 1, out_of_memory = 2, no_device = 100, invalid_context = 201,
                 invalid_image = 200, invalid_handle = 400, not_found = 500, not_ready = 600, launch_failed = 719;

CudaEmulation& emulation();
void say_and_abort(const char* sentence);

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Addresses that only streams may use: the pages are closed while none is at work.
class Memory {
 public:
  Result allocate(uint64_t* address, size_t bytes);
  Result free(uint64_t address);
  Result allocate_host(void** address, size_t bytes);
  Result free_host(void* address);
  // Memory that is there before and after.
  Result pin(void* address, size_t bytes);
  Result unpin(void* address);
  uint64_t used();
  size_t count();
  // Whether these bytes lie within one allocation.
  bool holds(uint64_t address, size_t bytes);
  std::vector<MslBuffer> all();  // in the order of their addresses

  void open();   // for a stream that begins to work
  void close();  // for one that has nothing left to do

 private:
  void protect(int access);

  std::mutex mutex_;
  std::map<uint64_t, size_t> there_;  // device allocations
  std::map<uint64_t, size_t> here_;   // pinned
  std::map<uint64_t, size_t> given_;  // likewise, and not of the driver
  std::byte* arena_ = nullptr;
  uint64_t used_ = 0;
  uint64_t top_ = 0;  // of what was ever used
  int open_ = 0;
};
Memory& memory();

// ---- Kernels --------------------------------------------------------------------------------------------------------

struct Module {
  void* library = nullptr;
  bool checked = false;  // made for the checker
  std::map<std::string, const MslKernel*> kernels;
  decltype(&msl_launch) launch = nullptr;
  decltype(&msl_report) report = nullptr;
  std::map<std::string, std::unique_ptr<struct Function>> functions;
};

struct Function {
  Module* module;
  const MslKernel* kernel;
  int shared_bytes = 48 << 10;
};

struct Launch {
  Function* function = nullptr;
  uint32_t grid[3] = {};
  uint32_t block[3] = {};
  uint32_t shared_bytes = 0;
  std::vector<char> params;
};
// The first of its threads that waits for the kernel before calls `wait`, unless that is null, and tells whether the
// launch has let the next one come.
using Wait = void (*)(void* previous, bool next_may_come);
Result run(const Launch& launch, Wait wait = nullptr, void* previous = nullptr);

// A thread of the host for a launch of a chain in which a kernel may come before the one that it waits for has ended.
class Relay {
 public:
  Relay();
  // Returns when the launch waits, or has ended: whether the next one may come.
  bool begin(std::function<void(Wait, void*)> launch);
  // Lets it go on, if it waits, and returns when it has ended.
  void end();

 private:
  enum class State { idle, running, waiting };

  void work();
  void rest(bool next_may_come);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(Wait, void*)> launch_;
  State state_ = State::idle;
  bool next_may_come_ = false;
};

// ---- Streams --------------------------------------------------------------------------------------------------------

// What went wrong in a kernel stays wrong: every later call says so.
Result context_error();
const char* context_report();
void break_context(const std::string& report);
void mend_context();

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0;
  int64_t done = 0;
};

class Stream {
 public:
  Stream();
  ~Stream();
  void add(std::function<void()> command);
  void wait();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> commands_;
  bool busy_ = false;
  bool ends_ = false;
  std::thread thread_;
};
void wait_for_all_streams();

}  // namespace nvidia
