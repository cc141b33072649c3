// Requests that are answered side by side. Python is told what each step did.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "decoder/decoder.h"
#include "moeflux.h"
#include "python/bindings.h"
#include "python/cancel.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

using PromptTokens = py::array_t<int32_t, py::array::c_style>;

// The Python objects of a request, until somebody without the interpreter's lock lets them go.
std::shared_ptr<void> owner_of(Session& session, Sampler& sampler) {
  using Both = std::pair<py::object, py::object>;
  constexpr auto as_they_are = py::return_value_policy::reference;  // finds the objects that they came with
  auto* const both = new Both(py::cast(&session, as_they_are), py::cast(&sampler, as_they_are));
  return {both, [](void* objects) {
            const Acquired acquire;
            delete static_cast<Both*>(objects);
          }};
}

int64_t add_request(Decoder& decoder, Session& session, const PromptTokens& tokens, Sampler& sampler,
                    std::vector<int32_t> stop_tokens, int64_t max_tokens, std::optional<int64_t> log_probabilities,
                    std::vector<int64_t> borders, bool masked, bool stepwise) {
  if (tokens.ndim() != 1) throw ArgumentError(concat("tokens: expected one dimension, found ", tokens.ndim()));
  Request request;
  request.session = &session;
  request.sampler = &sampler;
  request.owner = owner_of(session, sampler);
  request.tokens.assign(tokens.data(), tokens.data() + tokens.size());
  request.stop_tokens = std::move(stop_tokens);
  request.max_tokens = max_tokens;
  request.log_probabilities = log_probabilities;
  request.borders = std::move(borders);
  request.masked = masked;
  request.stepwise = stepwise;
  const Released release;
  return decoder.add(std::move(request));
}

void give_mask(Decoder& decoder, int64_t id, const std::optional<py::array>& bits) {
  std::optional<std::span<const uint32_t>> allowed;
  if (bits) {
    if (!py::isinstance<py::array_t<uint32_t>>(*bits) || bits->ndim() != 1 || !(bits->flags() & py::array::c_style))
      throw ArgumentError(concat("mask: expected a contiguous array of uint32 in one dimension, found ",
                                 text_of(bits->dtype()), " of shape ", text_of(bits->attr("shape"))));
    allowed = {static_cast<const uint32_t*>(bits->data()), static_cast<size_t>(bits->size())};
  }
  const Released release;
  decoder.set_mask(id, allowed);
}

std::vector<DecoderEvent> take_step(Decoder& decoder, const Cancel* cancel) {
  Watch watch(cancel);
  const Released release;
  return decoder.step(std::ref(watch));
}

std::vector<std::pair<int32_t, double>> likeliest_of(const DecoderEvent& event) {
  std::vector<std::pair<int32_t, double>> found;
  for (const LogProbability& each : event.likeliest) found.emplace_back(each.token, each.value);
  return found;
}

}  // namespace

void register_decoder(py::module_& m) {
  Class<DecoderEvent>(m, "DecoderEvent",
                      "What a step of a Decoder did for one request. There are several of one that has several tokens.")
      .def_readonly("id", &DecoderEvent::id)
      .def_readonly("token", &DecoderEvent::token, "That was chosen; one that ends the answer is not evaluated.")
      .def_readonly("logprob", &DecoderEvent::log_probability)
      .def_property_readonly("top", &likeliest_of, "The likeliest tokens and their log probabilities, best first.")
      .def_readonly("finish", &DecoderEvent::finish, "end, length, context or failed; empty: it goes on.")
      .def_readonly(
          "error", &DecoderEvent::error,
          "Why it failed. Of a request that goes on budget: there was no memory for its rows, and it is tried "
          "again.")
      .def_readonly("evaluated", &DecoderEvent::evaluated, "Tokens of the prompt.")
      .def_property_readonly("stats", copy_of(&DecoderEvent::stats),
                             "Of the engine's last call before the token was chosen.");

  Class<Decoder>(
      m, "Decoder",
      "Requests that are answered side by side. A request has its session and its sampler to itself until it "
      "is over or removed.")
      .def(constructor<Decoder, std::shared_ptr<Engine>, int64_t>(), py::arg("engine"), py::arg("rows") = 0)
      .def_property_readonly("rows", &Decoder::rows, "The most tokens of one step.")
      .def_property("prompt_rows", &Decoder::prompt_rows, &Decoder::set_prompt_rows,
                    "How many tokens of a step prompts may take while others go on with their answers.")
      .def(
          "add", &add_request, py::arg("session"), py::arg("tokens"), py::arg("sampler"), py::arg("stop_tokens"),
          py::arg("max_tokens"), py::arg("logprobs") = py::none(), py::arg("borders") = std::vector<int64_t>(),
          py::arg("masked") = false, py::arg("stepwise") = false,
          "Returns an id, greater than those before. Checkpoints are made at the positions `borders`. A masked request "
          "waits for `set_mask` before each choice. A stepwise one has one token a step, even where more were "
          "foreseen.")
      .def("set_mask", &give_mask, py::arg("id"), py::arg("bits"),
           "For one choice, uint32 [ceil(vocab / 32)]; None: every token is allowed.")
      .def("remove", &Decoder::remove, py::arg("id"), py::call_guard<Released>(),
           "Returns whether the session is free now; otherwise it is when the step under way is over.")
      .def("step", &take_step, py::arg("cancel") = py::none(),
           "Evaluates and chooses for all. Returns what became of each request that got further. Where steps are made "
           "ahead, it returns what came of them since the last time, and waits for one.")
      .def("go_ahead", &Decoder::go_ahead,
           "Makes further steps before they are asked for, until one brings anything but tokens. False, and there are "
           "none, where somebody has to do something between steps: when a prompt is read, or somebody answers who is "
           "masked or stepwise. Until all that came of them was taken, no session of a request may be used.")
      .def("end_ahead", &Decoder::end_ahead, py::arg("at_once") = false,
           "No further step is begun. The one under way is given up, if that is to be `at_once`.")
      .def_property_readonly("is_ahead", &Decoder::is_ahead,
                             "Whether a step is made ahead, or something came of one that `step` has not returned.");
}

}  // namespace moeflux::python
