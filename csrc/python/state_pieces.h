// What a session remembers, lent to Python for the length of a call, so that it can pass to or from a file in parts.
// And sums of these parts.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>

#include "core/xxh64.h"
#include "moeflux.h"
#include "python/class.h"

namespace moeflux::python {

// Python may keep this for longer than the call, and use it in any thread. Then it gets StateError.
class StatePieces {
 public:
  explicit StatePieces(std::span<const StateTensor> pieces) : pieces_(pieces) {}

  // (layer, name, dtype, shape) of each.
  pybind11::list list() const;
  // Those bytes of a piece that begin at `begin`, as many as the memory has.
  void read(int64_t index, int64_t begin, const pybind11::object& to) const;
  void write(int64_t index, int64_t begin, const pybind11::object& from) const;
  // The call is over. Waits for those who are still at it.
  void take_back();

 private:
  template <typename Use>
  void use(int64_t index, int64_t begin, size_t size, const Use& use) const;

  std::span<const StateTensor> pieces_;
  bool lent_ = true;
  mutable std::shared_mutex mutex_;  // guards both
};

// XXH64 of data that any thread may add.
class PythonXxh64 {
 public:
  void update(const pybind11::object& data);
  std::string hexdigest() const;

 private:
  Xxh64 sum_;
  mutable std::mutex mutex_;  // guards it
};

// show(StatePieces) of a session as it is.
void show_state(Session& session, const pybind11::function& show);
// fill(StatePieces), which writes all of them, and the session is where they say.
void fill_state(Session& session, int64_t position, std::span<const int32_t> tokens, const pybind11::function& fill);

void define_state_pieces(pybind11::module_& m);

}  // namespace moeflux::python
