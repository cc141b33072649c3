// What `moeflux doctor` measures with, and how experts are read by what is known of a disk.
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "core/choices.h"
#include "core/read_bandwidth.h"
#include "engine/experts/chosen_reads.h"
#include "io/probe.h"
#include "python/bindings.h"
#include "python/store_object.h"

namespace py = pybind11;
namespace fs = std::filesystem;

namespace moeflux::python {
namespace {

ReadMode read_mode(const std::string& word) {
  if (word == "direct") return ReadMode::direct;
  if (word == "buffered") return ReadMode::buffered;
  throw py::value_error("expected direct or buffered, found " + word);
}

py::tuple measure(const ProbeSource& source, int readers, double seconds, uint64_t seed, int64_t rooms = 0) {
  if (readers < 1 || readers > 256) throw py::value_error("expected 1 to 256 readers");
  ProbeRate rate;
  {
    const Released release;
    rate = probe_reads(source, readers, seconds, seed, check_signals, rooms);
  }
  return py::make_tuple(rate.reads, rate.bytes, rate.seconds);
}

}  // namespace

void register_probe(py::module_& m) {
  m.def(
      "probe_file_reads",
      [](const fs::path& path, int64_t piece_bytes, const std::string& mode, int readers, double seconds,
         uint64_t seed) {
        if (piece_bytes < direct_alignment || piece_bytes % direct_alignment != 0)
          throw py::value_error("expected pieces of whole blocks");
        FileReader reader(path.string(), read_mode(mode));
        return measure(pieces_of(reader, piece_bytes), readers, seconds, seed);
      },
      py::arg("path"), py::arg("piece_bytes"), py::arg("mode"), py::arg("readers"), py::arg("seconds"), py::arg("seed"),
      "(reads, bytes, seconds) of random reads of a file's pieces.");
  m.def(
      "probe_expert_reads",
      [](const Store& store, const std::string& mode, int readers, double seconds, uint64_t seed, int64_t rooms) {
        if (rooms < 0) throw py::value_error("expected no negative number of rooms");
        const ExpertStore experts(store.directory, {.mode = read_mode(mode)});
        return measure(pieces_of(experts), readers, seconds, seed, rooms);
      },
      py::arg("store"), py::arg("mode"), py::arg("readers"), py::arg("seconds"), py::arg("seed"), py::arg("rooms") = 0,
      "(reads, bytes, seconds) of random reads of a store's experts, into so many rooms in turn.");
  m.def(
      "chosen_reads",
      [](const std::string& asked, bool streams, bool direct_works, bool buffered_is_faster, bool crowds_out) {
        const ChosenReads chosen =
            chosen_reads(choice_of<Reads>("reads", asked), {streams, direct_works, buffered_is_faster, crowds_out});
        return py::make_tuple(chosen.mode == ReadMode::direct ? "direct" : "buffered", chosen.reason);
      },
      py::arg("asked"), py::kw_only(), py::arg("streams"), py::arg("direct_works"), py::arg("buffered_is_faster"),
      py::arg("crowds_out"), "How experts are read, \"direct\" or \"buffered\", and why.");

  Class<ReadBandwidth>(m, "ReadBandwidth", "A buffer that is larger than every cache, to measure how fast it is read.")
      .def(py::init([](int max_threads, int64_t part) {
             if (max_threads < 1 || max_threads > 1024 || part < 128 || part % 128 != 0)
               throw py::value_error("expected 1 to 1024 threads, parts that are multiples of 128");
             const Released release;
             return std::make_unique<ReadBandwidth>(max_threads, part);
           }),
           py::arg("max_threads"), py::arg("part") = ReadBandwidth::default_part)
      .def("measure", &ReadBandwidth::measure, py::arg("threads"), py::call_guard<Released>(),
           "Bytes per second of `threads` threads together.");
}

}  // namespace moeflux::python
