// The model under measurement: how it is opened, and what it is given to read.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments.h"
#include "moeflux.h"

namespace bench {

moeflux::EngineOptions engine_options(const Arguments& arguments, int64_t threads);

// Options with room for the frontiers and the steps after each. ArgumentError when that is more than the model has.
moeflux::SessionOptions session_options(const Arguments& arguments, const moeflux::Variant& variant);

// The same tokens in every run of a model: steps of a congruential generator, spread over the vocabulary. They are
// others for each `session`.
std::vector<int32_t> prompt_of(int64_t tokens, int64_t vocab, int64_t session = 0);

}  // namespace bench
