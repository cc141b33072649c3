// Choosing tokens. What is asked for has been checked by moeflux.sampling.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "decoder/choosing.h"
#include "moeflux.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace moeflux::python {
namespace {

using Allowed = std::optional<py::array>;

template <typename Element>
std::span<const Element> view_of(const char* what, const py::array& array) {
  if (!py::isinstance<py::array_t<Element>>(array) || array.ndim() != 1 || !(array.flags() & py::array::c_style))
    throw ArgumentError(concat(what, ": expected a contiguous array of ", text_of(py::dtype::of<Element>()),
                               " in one dimension, found ", text_of(array.dtype()), " of shape ",
                               text_of(array.attr("shape"))));
  return {static_cast<const Element*>(array.data()), static_cast<size_t>(array.size())};
}

std::span<const uint32_t> view_of(const Allowed& allowed) {
  return allowed ? view_of<uint32_t>("allowed", *allowed) : std::span<const uint32_t>();
}

// (token, its log probability, [(token, log probability)] of the likeliest). Unless they are asked for, None and [].
class Choice {
 public:
  explicit Choice(const std::optional<int64_t>& log_probabilities) : asked_(log_probabilities) {
    if (!asked_) return;
    if (*asked_ < 0 || *asked_ > max_log_probabilities)
      throw ArgumentError(concat("log_probabilities: expected 0 to ", max_log_probabilities, ", found ", *asked_));
    found_.best.resize(static_cast<size_t>(*asked_));
  }

  void make(Sampler& sampler, std::span<const float> logits, std::span<const uint32_t> allowed) {
    token_ = sampler.choose(logits, allowed, asked_ ? &found_ : nullptr);
  }

  void make(Sampler& sampler, const Session& session, std::span<const uint32_t> allowed) {
    token_ = choose_token(sampler, session, allowed, asked_ ? &found_ : nullptr);
  }

  py::tuple tuple() const {
    if (!asked_) return py::make_tuple(token_, py::none(), py::list());
    py::list best;
    for (const LogProbability& each : found_.best) best.append(py::make_tuple(each.token, each.value));
    return py::make_tuple(token_, found_.of_token, best);
  }

 private:
  std::optional<int64_t> asked_;
  int32_t token_ = 0;
  LogProbabilities found_;
};

}  // namespace

void register_sampling(py::module_& m) {
  m.def("sampler_bytes", &Sampler::max_bytes, py::arg("vocab_size"),
        "How much memory a Sampler of such a vocabulary has at most.");
  Class<Sampler>(m, "Sampler", "Chooses the tokens of one answer. See moeflux.sampling.")
      .def(py::init([](double temperature, int64_t top_k, double top_p, double min_p, double repetition_penalty,
                       double presence_penalty, double frequency_penalty, const std::map<int32_t, double>& logit_bias,
                       uint64_t seed, int64_t vocab_size, const py::array& prompt, const std::string& isa) {
             const Sampling sampling = {temperature,
                                        top_k,
                                        top_p,
                                        min_p,
                                        repetition_penalty,
                                        presence_penalty,
                                        frequency_penalty,
                                        {logit_bias.begin(), logit_bias.end()},
                                        seed};
             return std::make_unique<Sampler>(sampling, vocab_size, view_of<int32_t>("prompt", prompt), isa);
           }),
           py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"),
           py::arg("repetition_penalty"), py::arg("presence_penalty"), py::arg("frequency_penalty"),
           py::arg("logit_bias"), py::arg("seed"), py::arg("vocab_size"), py::arg("prompt"), py::arg("isa") = "")
      .def_property_readonly("chosen_from_shortlists", &Sampler::chosen_from_shortlists,
                             "How many tokens were chosen by what a device had found, without the logits.")
      .def(
          "choose",
          [](Sampler& sampler, const py::array& logits, const Allowed& allowed,
             const std::optional<int64_t>& log_probabilities) {
            Choice choice(log_probabilities);
            const std::span<const float> values = view_of<float>("logits", logits);
            const std::span<const uint32_t> words = view_of(allowed);
            {
              const Released release;
              choice.make(sampler, values, words);
            }
            return choice.tuple();
          },
          py::arg("logits"), py::arg("allowed") = py::none(), py::arg("log_probabilities") = py::none(),
          "(token, its log probability, those of the likeliest): from logits that lie anywhere.")
      .def(
          "choose_listed",
          [](Sampler& sampler, const py::array& logits, const py::array& sums, const py::array& greatests,
             const py::array& tokens, const py::array& values) {
            const std::span<const float> all = view_of<float>("logits", logits);
            std::vector<ShortlistBlock> blocks;
            for (const float greatest : view_of<float>("greatests", greatests))
              blocks.push_back({view_of<double>("sums", sums)[blocks.size()], greatest, -1});
            const std::function<std::span<const float>(int64_t)> read_block = [&](int64_t block) {
              const auto first = static_cast<size_t>(block * shortlist_block);
              return all.subspan(first, std::min<size_t>(shortlist_block, all.size() - first));
            };
            return sampler.choose({sampler.shortlist_factor(), sampler.vocab_size(), blocks,
                                   view_of<int32_t>("tokens", tokens), view_of<float>("values", values), read_block});
          },
          py::arg("logits"), py::arg("sums"), py::arg("greatests"), py::arg("tokens"), py::arg("values"),
          "For tests: by what Ops.shortlist gives for the logits, which are looked at as far as it asks. None where "
          "that "
          "does not tell.")
      .def_property_readonly("shortlist_factor", &Sampler::shortlist_factor,
                             "By what logits are weighed, over ln 2; 0 where a choice looks at all of them.")
      .def(
          "choose_of",
          [](Sampler& sampler, const Session& session, const Allowed& allowed,
             const std::optional<int64_t>& log_probabilities) {
            Choice choice(log_probabilities);
            const std::span<const uint32_t> words = view_of(allowed);
            {
              const Released release;
              choice.make(sampler, session, words);
            }
            return choice.tuple();
          },
          py::arg("session"), py::arg("allowed") = py::none(), py::arg("log_probabilities") = py::none(),
          "The same from a session's logits, where the engine left them.");
}

}  // namespace moeflux::python
