// Steps that a decoder makes before they are asked for, in a thread of their own: while somebody tells what came of one
// step, the next one is evaluated. The thread asks for nothing of whoever calls the decoder, so nobody has to let it
// have a lock of his own.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/threads.h"
#include "decoder/decoder.h"

namespace moeflux {

class Decoder::Ahead {
 public:
  explicit Ahead(Decoder& decoder) : decoder_(decoder) {}
  // Gives the step under way up.
  ~Ahead();
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

  // IoError when the system has no thread for it.
  void begin();
  // No further step is begun. `at_once`: the one under way is given up.
  void end(bool at_once);
  // Whether a step is under way, or something came of one that nobody has taken.
  bool is_under_way() const;
  // What came of the steps since the last time. Waits for one. Nothing when no step is under way and all was taken.
  // Throws what a step threw, after the events of those before it were taken.
  std::optional<std::vector<DecoderEvent>> take();

 private:
  // If whoever takes events comes later than this, the steps wait for him. It is enough for him to be held up for some
  // milliseconds by others.
  static constexpr size_t most_untaken = 8;

  bool has_any() const { return active_ || untaken_ > 0 || error_; }
  void work();

  Decoder& decoder_;
  std::atomic<bool> given_up_ = false;

  struct Sleep {
    std::mutex mutex;  // guards the rest
    std::condition_variable changed;
  };
  std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
  bool active_ = false;                                         // makes steps
  bool ended_ = false;                                          // makes no further one
  bool over_ = false;                                           // the thread is to end
  size_t untaken_ = 0;                                          // steps
  std::array<std::vector<DecoderEvent>, most_untaken> events_;  // of those
  std::exception_ptr error_;                                    // of the last step
  int64_t forks_ = 0;                                           // when the thread was made
  Threads thread_{"that steps ahead"};
};

}  // namespace moeflux
