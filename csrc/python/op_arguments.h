// NumPy arrays as the arguments of one op: checked, copied into memory of a backend, and back.
//
// Rows and heads are laid out with gaps between them. The gaps are filled with a number that no op may touch. So an op
// is noticed that ignores a stride, reads too far or writes too far.
#pragma once

#include <pybind11/numpy.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/mirror.h"
#include "python/interpreter.h"

namespace moeflux::python {

namespace py = pybind11;

using Shape = std::vector<int64_t>;

class OpArguments {
 public:
  OpArguments(Backend& backend, std::string op) : backend_(backend), op_(std::move(op)) {}

  // A contiguous float32 array of this shape; -1 for any length. The FormatError names `name`.
  View floats(const char* name, const py::array& array, const Shape& shape);
  View ints(const char* name, const py::array& array, const Shape& shape);
  // Optional: empty when None.
  View maybe_floats(const char* name, const py::object& array, const Shape& shape);

  // float32 [n, heads, dim] or [n, width], with gaps.
  Heads heads(const char* name, const py::array& array, const Shape& shape);
  Heads heads_out(int64_t n, int64_t heads, int64_t dim);
  // The numbers without the gaps: [n, heads, dim], or [n, dim] if `flat`. The gaps must be as they were.
  py::array_t<float> numbers(const Heads& heads, int64_t n, bool flat = false);

  // float32, uint16 (bf16) or int8 rows. Of the latter each head is its codes and the two bytes of their bf16 scale, so
  // the last dimension is longer than it says here.
  void check_rows(const char* name, const py::array& array, const Shape& shape) const;
  // As many rows of each, of one type, that share blocks. The blocks lie in two buffers by turns, the last first.
  // `unit` positions share a row.
  std::vector<Cache> in_blocks(const std::vector<py::array>& arrays, int64_t unit = 1);
  // The rows as they are now, an array like the one they came from.
  py::array rows_of(const Cache& cache, const py::array& like) const;

  // An object with format, weight, scales and biases: [rows, columns].
  Matrix matrix(const char* name, const py::handle& stored);

  // The same experts, one after another in slots of one buffer.
  std::vector<ExpertMatrices> in_slots(const char* name, std::vector<ExpertMatrices> experts);

  View output(int64_t elements);  // of four bytes
  // What the host sees of an argument. Before a run, that is what goes to the device, and after it what came back.
  template <typename T>
  T* values(const View& view) const {
    return mirrored(view).values<T>();
  }
  py::array_t<float> floats_of(const View& view, const Shape& shape) const;
  py::array_t<int32_t> ints_of(const View& view, const Shape& shape) const;

  // ArgumentError where a dimension is 0: there is nothing to compute with.
  void require_numbers(const char* name, const py::array& array) const;
  // Query heads stand in groups, one for each key head: `heads` is a multiple of `kv_heads`, which is 1 at least.
  void require_groups(const char* name, int64_t heads, int64_t kv_heads) const;

  // The caller's own sentence about an argument: [op] name: expected ..., found ...
  [[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& found) const;
  void require(bool holds, const char* name, const std::string& expected, int64_t found) const;

  // These copy all arguments to the device and back.
  void upload(Commands& commands) const;
  void download(Commands& commands) const;

  // Runs what `record` records in one batch, without the interpreter.
  template <typename Record>
  void run(const Record& record) {
    const Released release;
    std::unique_ptr<Commands> commands = backend_.begin();
    upload(*commands);
    record(*commands);
    download(*commands);
    backend_.submit(std::move(commands)).wait();
  }

 private:
  View allocate(int64_t bytes);
  View copy(const py::array& array);
  // visit(some bytes of a row, where they are in an array of all rows, how many they are).
  template <typename Visit>
  void each_row(const Cache& cache, int64_t rows, const Visit& visit) const;
  Mirrored mirrored(const View& view) const;
  void check(const char* name, const py::array& array, const std::vector<py::dtype>& types, const Shape& shape) const;

  Backend& backend_;
  std::string op_;
  std::vector<MirroredBuffer> buffers_;
  std::deque<std::vector<View>> blocks_;  // of rows
};

}  // namespace moeflux::python
