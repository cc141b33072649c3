// What every quantiser of rows needs: rows shared out over threads, numbers of any type, and the failure of the lowest
// row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/dtype.h"
#include "core/error.h"
#include "core/threads.h"
#include "format/quantize.h"

namespace moeflux {

// Calls work(first row, row past the last) for contiguous parts that together are all rows.
template <typename Work>
void share_rows(int64_t rows, int64_t columns, int threads, const Work& work) {
  constexpr int64_t numbers_worth_a_thread = 1 << 16;  // fewer cost less than starting one
  if (threads < 0) throw FormatError(concat("threads: expected 0 or more, found ", threads));
  if (threads == 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int64_t worth = std::max<int64_t>(1, rows * columns / numbers_worth_a_thread);
  const int64_t parts = std::clamp<int64_t>(std::min(rows, worth), 1, threads);
  const auto first_row = [&](int64_t part) { return rows / parts * part + std::min(part, rows % parts); };

  Threads helpers("that quantise");
  for (int64_t part = 1; part < parts; ++part) helpers.start([&, part] { work(first_row(part), first_row(part + 1)); });
  work(0, first_row(1));
  helpers.join();
}

// Keeps the failure in the lowest row, whichever thread comes first.
class FirstFailure {
 public:
  void report(int64_t row, std::string message) {
    const std::lock_guard lock(mutex_);
    if (message_ && row_ <= row) return;
    row_ = row;
    message_ = std::move(message);
  }

  // After every thread is done.
  void raise() const {
    if (message_) throw FormatError(*message_);
  }

 private:
  std::mutex mutex_;
  int64_t row_ = 0;
  std::optional<std::string> message_;
};

// `count` numbers from number `first` on, widened. Count is a multiple of 32.
void load_numbers(const std::byte* source, DType type, int64_t first, int64_t count, float* out);

struct Range {
  float low;
  float high;
  bool finite;
};

Range find_range(const float* values, int64_t count);  // a multiple of 32

// For messages: "[quantize] row 3, columns 0 to 63".
std::string place_of(int64_t row, int64_t first_column, int64_t columns);
std::string not_finite_message(const std::string& where, const float* values, int64_t first_column);
// FormatError if no numbers of this matrix could be quantised.
void check_numbers(const char* where, const MatrixView& matrix, const QuantFormat& format);

}  // namespace moeflux
