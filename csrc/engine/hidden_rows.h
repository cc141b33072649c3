// Hidden rows that go from a stage of a model to the next one (`Work` in moeflux.h): what they must be.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "models/variant.h"
#include "moeflux.h"

namespace moeflux {

// Where the first of these numbers is that is infinite or none.
std::optional<size_t> first_not_finite(std::span<const float> numbers);

// ArgumentError unless the rows that this part of a model takes and gives are there, and no others, for each token of
// the work, and finite.
void check_hidden_rows(const Variant& part, const Work& work);

}  // namespace moeflux
