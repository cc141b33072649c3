#include "python/state_pieces.h"

#include <pybind11/stl.h>

#include <memory>
#include <mutex>

#include "core/error.h"
#include "python/bytes_view.h"
#include "python/interpreter.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

void lend(std::span<const StateTensor> pieces, const py::function& to) {
  const auto lent = std::make_shared<StatePieces>(pieces);
  struct Loan {
    StatePieces& pieces;
    ~Loan() { pieces.take_back(); }
  } const loan{*lent};
  to(lent);
}

}  // namespace

py::list StatePieces::list() const {
  const std::shared_lock lock(mutex_);
  if (!lent_) throw StateError("state: expected it to be used before the call returns, found the call over");
  py::list found;
  for (const StateTensor& each : pieces_)
    found.append(py::make_tuple(each.layer, each.name, std::string(dtype_name(each.dtype)), each.shape));
  return found;
}

void StatePieces::read(int64_t index, int64_t begin, const py::object& to) const {
  const BytesView room(to, PyBUF_WRITABLE);
  const Released release;
  use(index, begin, room.bytes().size(), [&](const StateTensor& piece) { piece.read(begin, room.writable()); });
}

void StatePieces::write(int64_t index, int64_t begin, const py::object& from) const {
  const BytesView data(from);
  const Released release;
  use(index, begin, data.bytes().size(), [&](const StateTensor& piece) { piece.write(begin, data.bytes()); });
}

template <typename Use>
void StatePieces::use(int64_t index, int64_t begin, size_t size, const Use& use) const {
  const std::shared_lock lock(mutex_);
  if (!lent_) throw StateError("state: expected it to be used before the call returns, found the call over");
  const auto count = static_cast<int64_t>(pieces_.size());
  if (index < 0 || index >= count)
    throw ArgumentError(concat("state: expected a piece 0 to ", count - 1, ", found ", index));
  const StateTensor& piece = pieces_[static_cast<size_t>(index)];
  if (begin < 0 || begin > piece.bytes || size > static_cast<size_t>(piece.bytes - begin))
    throw ArgumentError(concat("state: expected bytes within the ", piece.bytes, " of the piece, found ", size,
                               " from ", begin, " on"));
  use(piece);
}

void StatePieces::take_back() {
  const Released release;
  const std::unique_lock lock(mutex_);
  lent_ = false;
}

void PythonXxh64::update(const py::object& data) {
  const BytesView view(data);
  const Released release;
  const std::lock_guard lock(mutex_);
  sum_.add(view.bytes());
}

std::string PythonXxh64::hexdigest() const {
  const Released release;
  const std::lock_guard lock(mutex_);
  const uint64_t sum = sum_.sum();
  std::string digits;
  for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[sum >> shift & 15];
  return digits;
}

void show_state(Session& session, const py::function& show) {
  session.read_state([&](std::span<const StateTensor> pieces) { lend(pieces, show); });
}

void fill_state(Session& session, int64_t position, std::span<const int32_t> tokens, const py::function& fill) {
  session.restore(position, tokens, [&](std::span<const StateTensor> pieces) { lend(pieces, fill); });
}

void define_state_pieces(py::module_& m) {
  Class<StatePieces, std::shared_ptr<StatePieces>>(
      m, "StatePieces", "What a session remembers. It may be used, in any thread, until the call that gave it returns.")
      .def("list", &StatePieces::list, "(layer, name, dtype, shape) of each piece, in layer order.")
      .def("read", &StatePieces::read, py::arg("index"), py::arg("begin"), py::arg("to"),
           "Fills memory with the bytes of a piece from `begin` on.")
      .def("write", &StatePieces::write, py::arg("index"), py::arg("begin"), py::arg("data"),
           "Replaces the bytes of a piece from `begin` on.");

  Class<PythonXxh64>(m, "Xxh64", "XXH64 with the seed 0, in the manner of hashlib: a quick sum against damage.")
      .def(constructor<PythonXxh64>())
      .def("update", &PythonXxh64::update, py::arg("data"))
      .def("hexdigest", &PythonXxh64::hexdigest);
}

}  // namespace moeflux::python
