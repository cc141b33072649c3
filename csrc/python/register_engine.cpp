// Engines and sessions. Long calls run without the interpreter's lock. NumPy arrays are made and checked with it.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "core/error.h"
#include "engine/engine.h"
#include "engine/footprint.h"
#include "format/variant_json.h"
#include "io/expert_store.h"
#include "moeflux.h"
#include "python/bindings.h"
#include "python/cancel.h"
#include "python/plain_step.h"
#include "python/state_pieces.h"
#include "python/store_object.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

using Tokens = py::array_t<int32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

const std::pair<int64_t, int64_t> all_layers = {0, 0};  // first, and one past the last; 0: to the end

constexpr int64_t max_picks = int64_t{1} << 24;

std::span<const int32_t> view_of(const Tokens& tokens) {
  if (tokens.ndim() != 1) throw ArgumentError(concat("tokens: expected one dimension, found ", tokens.ndim()));
  return {tokens.data(), static_cast<size_t>(tokens.size())};
}

void check_floats(const char* what, const py::array& found, const std::vector<py::ssize_t>& shape, bool writeable) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(found.data()) % alignof(float) == 0;
  const bool fits = py::isinstance<py::array_t<float>>(found) && (found.flags() & py::array::c_style) && is_aligned &&
                    (found.writeable() || !writeable) &&
                    std::vector(found.shape(), found.shape() + found.ndim()) == shape;
  if (!fits)
    throw ArgumentError(concat(what, ": expected a ", writeable ? "writeable, " : "",
                               "contiguous float32 array of shape ", text_of(py::tuple(py::cast(shape))), ", found ",
                               text_of(found.dtype()), " of shape ", text_of(found.attr("shape"))));
}

std::span<float> room_in(const py::array& out, const std::vector<py::ssize_t>& shape) {
  check_floats("out", out, shape, true);
  return {static_cast<float*>(const_cast<void*>(out.data())), static_cast<size_t>(out.size())};
}

std::span<const float> floats_in(const char* what, const py::array& array, const std::vector<py::ssize_t>& shape) {
  check_floats(what, array, shape, false);
  return {static_cast<const float*>(array.data()), static_cast<size_t>(array.size())};
}

DType kv_dtype(const std::string& name) {
  if (name == "f32") return DType::f32;
  if (name == "bf16") return DType::bf16;
  if (name == "q8") return DType::i8;
  throw ArgumentError(concat("kv_dtype: expected f32, bf16 or q8, found ", name));
}

// Ctrl-C is noticed after each chunk of a prefill, or piece of a file, whether or not the caller wants to hear of
// progress. What the callback throws passes through. Only if it returns False, the call stops.
Progress guarded(const std::optional<py::function>& callback) {
  return [&callback](int64_t done, int64_t total) {
    const Acquired acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return !callback || !call_back(*callback, done, total).is(py::bool_(false));
  };
}

std::pair<int64_t, int64_t> prefill(Session& session, const Tokens& tokens,
                                    const std::optional<py::function>& on_progress,
                                    const std::optional<py::array>& all_logits, int64_t vocab, const Cancel* cancel) {
  const std::span<const int32_t> ids = view_of(tokens);
  std::span<float> room;
  if (all_logits) room = room_in(*all_logits, {static_cast<py::ssize_t>(ids.size()), vocab});
  const Progress progress = guarded(on_progress);
  Watch watch(cancel);
  const Released release;
  const Evaluated evaluated = session.prefill(ids, progress, room, std::ref(watch));
  return {evaluated.tokens, evaluated.serial};
}

int64_t step(Session& session, int32_t token, const Cancel* cancel, std::optional<int64_t> serial) {
  Watch watch(cancel);
  const Released release;
  return session.step(token, std::ref(watch), serial).serial;
}

template <typename Of>
std::pair<int64_t, int64_t> layers_of(const Of& of) {
  const LayerRange range = of.layers();
  return {range.first, range.last};
}

// A session, its next tokens, room for what all of them yield, and the hidden rows that they begin with. That room is
// for logits, where they are wanted, or for hidden rows, with an engine that has not the last layer.
using Piece = std::tuple<Session*, Tokens, std::optional<py::array>, std::optional<py::array>>;

// The serial of each session's logits, and what is wrong with it, if anything is.
std::vector<std::pair<int64_t, std::string>> evaluate(Engine& engine, const std::vector<Piece>& pieces, bool logits,
                                                      const Cancel* cancel) {
  const Variant& variant = engine.variant();
  const auto width = static_cast<py::ssize_t>(variant.row_width());
  const auto out_width = variant.ends() ? static_cast<py::ssize_t>(variant.vocab_size) : width;
  std::vector<Work> work;
  work.reserve(pieces.size());
  std::vector<std::pair<int64_t, std::string>> done;  // has its room before: what comes behind must not fail
  done.reserve(pieces.size());
  for (const auto& [session, tokens, out, hidden] : pieces) {
    Work& each = work.emplace_back();
    each.session = session;
    each.tokens = view_of(tokens);
    const auto count = static_cast<py::ssize_t>(each.tokens.size());
    if (out) (variant.ends() ? each.all_logits : each.hidden_out) = room_in(*out, {count, out_width});
    if (hidden) each.hidden_in = floats_in("hidden", *hidden, {count, width});
    each.logits = logits;
  }
  Watch watch(cancel);
  {
    const Released release;
    engine.evaluate(work, std::ref(watch));
  }
  for (Work& each : work) done.emplace_back(each.serial, std::move(each.failure));
  return done;
}

Floats logits(const Session& session, const std::optional<py::array>& out, int64_t vocab) {
  const auto size = static_cast<py::ssize_t>(vocab);
  Floats result = out ? Floats(*out) : Floats(size);
  const std::span<float> room = room_in(out ? *out : result, {size});
  const Released release;
  session.read_logits([&](std::span<const float> all) { std::copy(all.begin(), all.end(), room.begin()); });
  return result;
}

std::vector<std::tuple<std::string, int64_t, int64_t>> slots_of(const Engine& engine) {
  const char* const upper = engine.held_by_device() > 0 ? "device" : "host";
  std::vector<std::tuple<std::string, int64_t, int64_t>> slots = {
      {upper, engine.expert_slots(), engine.filled_slots()}};
  if (engine.host_slots() > 0) slots.emplace_back("host", engine.host_slots(), engine.filled_host_slots());
  return slots;
}

py::tuple likeliest(const Session& session, int64_t k) {
  // The session checks what it takes itself. This limit is for the arrays.
  if (k < 1 || k > max_picks) throw ArgumentError(concat("k: expected 1 to ", max_picks, ", found ", k));
  py::array_t<int32_t> ids(k);
  Floats values(k);
  const std::span<int32_t> id_room = {ids.mutable_data(), static_cast<size_t>(k)};
  const std::span<float> value_room = {values.mutable_data(), static_cast<size_t>(k)};
  {
    const Released release;
    session.top_k(id_room, value_room);
  }
  return py::make_tuple(ids, values);
}

// bf16 has no type in NumPy: its bits are uint16.
py::dtype numpy_type(DType type) {
  if (type == DType::i8) return py::dtype::of<int8_t>();
  return type == DType::f32 ? py::dtype::of<float>() : py::dtype::of<uint16_t>();
}

py::list read_state(Session& session) {
  py::list tensors;
  session.read_state([&](std::span<const StateTensor> pieces) {
    for (const StateTensor& tensor : pieces) {
      py::array copy(numpy_type(tensor.dtype), tensor.shape);
      tensor.read(0, {static_cast<std::byte*>(copy.mutable_data()), static_cast<size_t>(tensor.bytes)});
      tensors.append(py::make_tuple(tensor.layer, tensor.name, copy));
    }
  });
  return tensors;
}

// moeflux.Snapshot has checked `given` against the session's own shapes. A piece that still does not fit is refused.
void restore(Session& session, int64_t position, const Tokens& tokens, const std::vector<py::array>& given) {
  session.restore(position, view_of(tokens), [&](std::span<const StateTensor> pieces) {
    size_t next = 0;
    for (const StateTensor& tensor : pieces) {
      if (next == given.size())
        throw ArgumentError(concat("restore: expected a tensor for layer ", tensor.layer, ", found none"));
      const py::array& array = given[next++];
      const bool fits = array.dtype().equal(numpy_type(tensor.dtype)) && (array.flags() & py::array::c_style) &&
                        std::vector<int64_t>(array.shape(), array.shape() + array.ndim()) == tensor.shape;
      if (!fits)
        throw ArgumentError(concat("restore: layer ", tensor.layer, ", ", tensor.name, ": the array does not fit"));
      tensor.write(0, {static_cast<const std::byte*>(array.data()), static_cast<size_t>(tensor.bytes)});
    }
  });
}

void fill(Session& session, int64_t position, const Tokens& tokens, const py::function& all) {
  fill_state(session, position, view_of(tokens), all);
}

double share(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

void register_stats(py::module_& m) {
  Class<StepStats>(m, "StepStats",
                   "What evaluating tokens has cost: in the last call, or in all calls since the session was made.")
      .def_readonly("tokens", &StepStats::tokens)
      .def_readonly("seconds", &StepStats::seconds, "How long the whole call took.")
      .def_readonly("compute_seconds", &StepStats::compute_seconds, "How long recording and running ops took.")
      .def_readonly("read_wait_seconds", &StepStats::read_wait_seconds,
                    "How long the call stood still for expert reads.")
      .def_readonly("router_seconds", &StepStats::router_seconds,
                    "The part of compute_seconds until the routers have spoken.")
      .def_readonly("beside_seconds", &StepStats::beside_seconds,
                    "The part of compute_seconds in the shared expert and experts in slots, during the reads.")
      .def_readonly("arrived_seconds", &StepStats::arrived_seconds,
                    "The part of compute_seconds in experts as they arrived.")
      .def_readonly("read_busy_seconds", &StepStats::read_busy_seconds,
                    "How long at least one expert read was under way.")
      .def_readonly("bytes_read", &StepStats::bytes_read, "Bytes of expert reads, including those of the look-ahead.")
      .def_readonly(
          "expert_hits", &StepStats::expert_hits,
          "Experts found in a slot, or on their way into one. Where the host does not know the choice of several "
          "rows, each row's counts.")
      .def_readonly("ngram_hits", &StepStats::ngram_hits,
                    "Rows of n-gram tables found in memory, or on their way there.")
      .def_readonly("ngram_misses", &StepStats::ngram_misses,
                    "Rows of n-gram tables that had to be read and were not on their way.")
      .def_readonly("expert_misses", &StepStats::expert_misses,
                    "Experts that had to be brought and were not on their way.")
      .def_readonly("host_hits", &StepStats::host_hits,
                    "Those of them that were in slots of the host's memory, or on their way there.")
      .def_readonly("experts_on_cpu", &StepStats::experts_on_cpu, "Those of host_hits that the CPU computed.")
      .def_readonly("bytes_copied", &StepStats::bytes_copied, "Bytes of experts copied from there to the device.")
      .def_readonly("submissions", &StepStats::submissions, "How many batches the backend was given.")
      .def_readonly("waits", &StepStats::waits, "How many times the host waited for a batch.")
      .def_readonly("look_ahead_reads", &StepStats::look_ahead_reads, "Experts whose reads the look-ahead began.")
      .def_readonly("look_ahead_used", &StepStats::look_ahead_used,
                    "How many of these experts their layer's router picked.")
      .def_readonly("look_ahead_wasted_bytes", &StepStats::look_ahead_wasted_bytes,
                    "Bytes read for the experts that it did not pick.")
      .def_readonly("look_ahead_pays", &StepStats::look_ahead_pays,
                    "Whether steps were faster with it when they were last compared; None before that.")
      .def_readonly("drafted", &StepStats::drafted, "Tokens evaluated because they were likely to come next.")
      .def_readonly("accepted", &StepStats::accepted, "How many of them came.")
      .def_readonly("drafts_pay", &StepStats::drafts_pay,
                    "Whether tokens came faster with them when that was last compared; None before that.")
      .def_property_readonly(
          "look_ahead_recall",
          [](const StepStats& s) { return share(s.look_ahead_used, s.look_ahead_used + s.expert_misses); },
          "The share of the experts to be read that was foreseen, or 0 if none had to be read.")
      .def_property_readonly(
          "look_ahead_precision", [](const StepStats& s) { return share(s.look_ahead_used, s.look_ahead_reads); },
          "The share of the look-ahead's reads that was wanted, or 0 if it read none.")
      .def("__repr__", [](const StepStats& s) {
        return concat("StepStats(tokens=", s.tokens, ", seconds=", s.seconds,
                      ", read_wait_seconds=", s.read_wait_seconds, ", bytes_read=", s.bytes_read,
                      ", expert_hits=", s.expert_hits, ", expert_misses=", s.expert_misses, ")");
      });
}

// 64 hexadecimal digits for each expert of each layer that has any; empty if the store has none.
using Checksums = std::map<int64_t, std::vector<std::string>>;

ExpertChecksums parse_checksums(const Checksums& given, const Variant& variant) {
  ExpertChecksums checksums(given.empty() ? 0 : static_cast<size_t>(variant.all_layers()));
  for (const auto& [layer, sums] : given)
    for (const std::string& sum : sums)
      checksums.at(static_cast<size_t>(layer)).push_back(parse_sha256(sum, concat("checksums of layer ", layer)));
  return checksums;
}

std::shared_ptr<Engine> open(const EngineFaults& faults, const Store& store, const std::string& backend, int device,
                             const std::string& isa, const std::string& precision, int threads, int readers,
                             int64_t expert_slots, int64_t host_slots, int ring_depth, int64_t chunk,
                             int64_t session_bytes, int64_t host_session_bytes, const std::string& reads,
                             const std::string& cache, const std::string& look_ahead, const std::string& cpu_experts,
                             const std::string& speculate, const std::pair<int64_t, int64_t>& layers,
                             const std::optional<Checksums>& checksums, const std::optional<py::function>& on_progress,
                             bool time_ops) {
  EngineOptions options;
  options.backend = backend;
  options.device = device;
  options.isa = isa;
  options.precision = choice_of<Precision>("precision", precision);
  options.threads = threads;
  options.readers = readers;
  options.expert_slots = expert_slots;
  options.host_slots = host_slots;
  options.ring_depth = ring_depth;
  options.chunk = chunk;
  options.reads = choice_of<Reads>("reads", reads);
  options.cache = choice_of<CachePolicy>("cache", cache);
  options.look_ahead = choice_of<LookAhead>("look_ahead", look_ahead);
  options.cpu_experts = choice_of<CpuExperts>("cpu_experts", cpu_experts);
  options.speculate = choice_of<Speculate>("speculate", speculate);
  options.layers = {layers.first, layers.second};
  options.verify_reads = checksums.has_value();
  options.session_bytes = session_bytes;
  options.host_session_bytes = host_session_bytes;
  options.time_ops = time_ops;
  options.on_load = guarded(on_progress);
  const Released release;
  StoreDirectory directory = store.directory;
  if (checksums) directory.expert_checksums = parse_checksums(*checksums, directory.variant);
  return open_engine(std::move(directory), options, faults);
}

using SayFootprint = Footprint (*)(const StoreDirectory& store, const EngineOptions& options,
                                   const SessionOptions& session, bool apart);

template <SayFootprint say>
Footprint footprint_of(const EngineFaults& faults, const Store& store, const std::string& backend, int readers,
                       int64_t expert_slots, int64_t host_slots, int ring_depth, int64_t chunk,
                       const std::string& reads, const std::string& cache, const std::string& cpu_experts,
                       const std::string& speculate, const std::pair<int64_t, int64_t>& layers, bool verify_reads,
                       int64_t max_context, const std::string& kv, int64_t max_checkpoints) {
  EngineOptions options;
  options.backend = backend;
  options.readers = readers;
  options.expert_slots = expert_slots;
  options.host_slots = host_slots;
  options.ring_depth = ring_depth;
  options.chunk = chunk;
  options.reads = choice_of<Reads>("reads", reads);
  options.cache = choice_of<CachePolicy>("cache", cache);
  options.cpu_experts = choice_of<CpuExperts>("cpu_experts", cpu_experts);
  options.speculate = choice_of<Speculate>("speculate", speculate);
  options.layers = {layers.first, layers.second};
  options.verify_reads = verify_reads;
  return say(store.directory, options, {max_context, kv_dtype(kv), max_checkpoints}, faults.backend.apart);
}

void register_footprint(py::module_& m, Class<Testing>& testing) {
  Class<Footprint>(m, "Footprint", "Bytes of memory by what they are for: planned, or held. See moeflux.h.")
      .def_readonly("dense_weights", &Footprint::dense_weights)
      .def_readonly("expert_slots", &Footprint::expert_slots)
      .def_readonly("host_slots", &Footprint::host_slots)
      .def_readonly("scratch", &Footprint::scratch)
      .def_readonly("ngram_rows", &Footprint::ngram_rows)
      .def_readonly("read_buffers", &Footprint::read_buffers)
      .def_readonly("tables", &Footprint::tables)
      .def_readonly("loading", &Footprint::loading)
      .def_readonly("rows", &Footprint::rows)
      .def_readonly("recurrent", &Footprint::recurrent)
      .def_readonly("checkpoints", &Footprint::checkpoints)
      .def_readonly("tokens", &Footprint::tokens)
      .def_property_readonly("engine", &Footprint::engine)
      .def_property_readonly("sessions", &Footprint::sessions)
      .def_property_readonly("total", &Footprint::total);
  const auto define = [&](auto&&... arguments) {
    m.def(
        "footprint", without_faults(&footprint_of<footprint>), arguments...,
        "What an engine opened with these options and one such session will hold. Takes no memory and opens no file.");
    testing.def_static("footprint", &footprint_of<footprint>, py::arg("faults"), arguments...,
                       "Like footprint, for a device with these faults.");
    m.def("device_footprint", without_faults(&footprint_of<device_footprint>), arguments...,
          "The part of it that is in a device's own memory; nothing where it shares the host's.");
    testing.def_static("device_footprint", &footprint_of<device_footprint>, py::arg("faults"), arguments...,
                       "Like device_footprint, for a device with these faults.");
  };
  define(py::arg("store"), py::kw_only(), py::arg("backend") = "auto", py::arg("readers") = 0,
         py::arg("expert_slots") = 0, py::arg("host_slots") = 0, py::arg("ring_depth") = 2, py::arg("chunk") = 0,
         py::arg("reads") = "auto", py::arg("cache") = "lru", py::arg("cpu_experts") = "off",
         py::arg("speculate") = "off", py::arg("layers") = all_layers, py::arg("verify_reads") = false,
         py::arg("max_context") = 0, py::arg("kv_dtype") = "f32", py::arg("max_checkpoints") = 4);
  m.def(
      "kernels_to_compile",
      [](const Store& store, const std::string& backend, int device, const std::string& speculate,
         const std::pair<int64_t, int64_t>& layers, const std::string& kv) {
        EngineOptions options;
        options.backend = backend;
        options.device = device;
        options.speculate = choice_of<Speculate>("speculate", speculate);
        options.layers = {layers.first, layers.second};
        return kernels_to_compile(store.directory, options, kv_dtype(kv));
      },
      py::arg("store"), py::kw_only(), py::arg("backend") = "auto", py::arg("device") = 0, py::arg("speculate") = "off",
      py::arg("layers") = all_layers, py::arg("kv_dtype") = "f32", py::call_guard<Released>(),
      "What must be compiled for the device before this model runs there: units, by their names. For `cuda_make`.");
  m.def(
      "slot_bytes", [](const Store& store) { return slot_layout(store.directory).bytes; }, py::arg("store"),
      "What one expert takes in memory.");
}

}  // namespace

void register_engine(py::module_& m, Class<Testing>& testing) {
  register_stats(m);
  register_footprint(m, testing);
  using release = py::call_guard<Released>;

  Class<Cancel>(m, "Cancel",
                "Gives up the call of `prefill`, `step` or `evaluate` that it was passed to. Once set, it stays set. "
                "`set` may be called from any thread, or from a signal handler.")
      .def(constructor<Cancel>())
      .def("set", &Cancel::set)
      .def("set_after", &Cancel::set_after, py::arg("seconds"),
           "Sets it so many seconds from now, or earlier if it was to be set earlier.")
      .def("is_set", &Cancel::is_set);

  define_state_pieces(m);
  // Session is known before Engine's methods, so that their signatures can name it.
  Class<Session> session(m, "Session", "One timeline of tokens. See moeflux.Session.");

  Class<Engine, std::shared_ptr<Engine>> engines(m, "Engine", "A loaded model. See moeflux.Model.");
  const auto define = [&](auto&&... arguments) {
    engines.def(
        py::init(without_faults(&open)), arguments...,
        "With `checksums`, {layer: SHA-256 of each expert}, every expert is verified when it is read. `layers`: "
        "the first that it has, and one past the last; 0: to the end.");
    testing.def_static("engine", &open, py::arg("faults"), arguments..., "Like Engine, but with these faults.");
  };
  define(py::arg("store"), py::kw_only(), py::arg("backend") = "auto", py::arg("device") = 0, py::arg("isa") = "",
         py::arg("precision") = "auto", py::arg("threads") = 0, py::arg("readers") = 0, py::arg("expert_slots") = 0,
         py::arg("host_slots") = 0, py::arg("ring_depth") = 2, py::arg("chunk") = 0, py::arg("session_bytes") = 0,
         py::arg("host_session_bytes") = 0, py::arg("reads") = "auto", py::arg("cache") = "lru",
         py::arg("look_ahead") = "auto", py::arg("cpu_experts") = "off", py::arg("speculate") = "off",
         py::arg("layers") = all_layers, py::arg("checksums") = py::none(), py::arg("on_progress") = py::none(),
         py::arg("time_ops") = false);
  testing.def_static(
      "steps_ahead", [](Engine& engine) { return dynamic_cast<LoadedEngine&>(engine).steps_ahead(); },
      py::arg("engine"), "How many steps were recorded before they were asked for, and how many of them were then.");
  engines.def("describe", &Engine::describe)
      .def_property_readonly("memory", &Engine::memory, "What is held now, by what it is for.")
      .def_property_readonly("held", &Engine::held, "The same, counted where memory is given out.")
      .def_property_readonly("held_by_device", &Engine::held_by_device,
                             "The part of `held` that is in a device's own memory.")
      .def_property_readonly("slots", &slots_of,
                             "Of experts, the uppermost first: in whose memory they are, how many there are, and how "
                             "many have one now.")
      .def_property_readonly("sessions", &Engine::sessions)
      .def_property_readonly("layers", &layers_of<Engine>,
                             "The model's layers that it has: the first, and one past the last.")
      .def_property_readonly(
          "width", [](const Engine& engine) { return engine.variant().row_width(); }, "Numbers of a hidden row.")
      .def("take_op_times", &Engine::take_op_times, release())
      .def(
          "session",
          [](Engine& engine, int64_t max_context, const std::string& kv, int64_t max_checkpoints) {
            const SessionOptions options = {max_context, kv_dtype(kv), max_checkpoints};
            const Released unlocked;
            return engine.session(options);
          },
          py::arg("max_context") = 0, py::arg("kv_dtype") = "f32", py::arg("max_checkpoints") = 4)
      .def("evaluate", &evaluate, py::arg("work"), py::arg("logits"), py::arg("cancel") = py::none(),
           "Evaluates (session, tokens, out, hidden) together: `out` is room for the logits of all tokens, or, without "
           "the last layer, for hidden rows; `hidden` are those of the layer before, if there is one. Returns (the "
           "serial of its logits, what is wrong with it) for each session.");

  define_plain_step(engines, session);

  session.def_property_readonly("position", &Session::position)
      .def_property_readonly("max_context", &Session::max_context)
      .def_property_readonly("layers", &layers_of<Session>, "Those of its engine.")
      .def_property_readonly("tokens", &Session::tokens)
      .def("prefill", &prefill, py::arg("tokens"), py::arg("on_progress"), py::arg("all_logits"), py::arg("vocab"),
           py::arg("cancel") = py::none(),
           "Evaluates tokens. Returns how many, and the serial of the logits that they left.")
      .def("step", &step, py::arg("token"), py::arg("cancel") = py::none(), py::arg("serial") = py::none(),
           "Evaluates one token. Returns the serial of its logits.")
      .def("foresees", &Session::foresees, py::arg("token"),
           "Whether a call before has evaluated this token as the next one.")
      .def_property_readonly("logits_serial", &Session::logits_serial)
      .def("logits", &logits, py::arg("out"), py::arg("vocab"))
      .def("top_k", &likeliest, py::arg("k"))
      .def("clear", &Session::clear, release())
      .def("fork", &Session::fork, py::arg("position") = py::none(), release())
      .def("checkpoint", &Session::checkpoint, release())
      .def_property_readonly("checkpoints", &Session::checkpoints)
      .def_property_readonly("exact_from", &Session::exact_from)
      .def("set_max_checkpoints", &Session::set_max_checkpoints, py::arg("count"))
      .def("rewind", &Session::rewind, py::arg("position"), py::arg("exact") = true, release())
      .def("read_state", &read_state, "(layer, name, copy) of every piece of state, in layer order.")
      .def("restore", &restore, py::arg("position"), py::arg("tokens"), py::arg("tensors"))
      .def("make_room", &Session::make_room, py::arg("tokens"),
           "Takes memory for the rows of so many more tokens, for the next call.")
      .def("show_state", &show_state, py::arg("show"), "Calls show(StatePieces), which may read them.")
      .def("fill_state", &fill, py::arg("position"), py::arg("tokens"), py::arg("fill"),
           "Calls fill(StatePieces), which must write all of them: the state after these tokens.")
      .def_property_readonly("last", &Session::last)
      .def_property_readonly("total", &Session::total);
}

}  // namespace moeflux::python
