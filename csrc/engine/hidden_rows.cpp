#include "engine/hidden_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "core/error.h"

namespace moeflux {
namespace {

// Adding one to an exponent of ones alone, which infinities and NaN have, reaches the sign. Many numbers at once,
// because a vocabulary has hundreds of thousands.
bool all_finite(std::span<const float> numbers) {
  constexpr size_t together = 16;
  std::array<uint32_t, together> reached{};
  const auto add = [&](size_t i, size_t lane) {
    reached[lane] |= (std::bit_cast<uint32_t>(numbers[i]) & 0x7fffffffu) + 0x00800000u;
  };
  const size_t whole = numbers.size() / together * together;
  for (size_t i = 0; i < whole; i += together)
    for (size_t lane = 0; lane < together; ++lane) add(i + lane, lane);
  for (size_t i = whole; i < numbers.size(); ++i) add(i, 0);
  return std::ranges::none_of(reached, [](uint32_t each) { return each >> 31; });
}

// The rows of one side of a stage. `wanted`: whether there are any there.
void check_side(const char* what, const Variant& part, bool wanted, const Work& work, size_t found) {
  const auto width = static_cast<size_t>(part.row_width());
  const size_t tokens = work.tokens.size();
  if (found == (wanted ? tokens * width : 0)) return;
  const std::string expected = wanted ? concat(tokens, " x ", width, " numbers") : "none";
  throw ArgumentError(concat(what, ": expected ", expected, " with ", part.layers_named(), ", found ",
                             found == 0 ? "none" : std::to_string(found)));
}

}  // namespace

std::optional<size_t> first_not_finite(std::span<const float> numbers) {
  if (all_finite(numbers)) return std::nullopt;
  return std::ranges::find_if(numbers, [](float each) { return !std::isfinite(each); }) - numbers.begin();
}

void check_hidden_rows(const Variant& part, const Work& work) {
  check_side("hidden_in", part, !part.begins(), work, work.hidden_in.size());
  check_side("hidden_out", part, !part.ends(), work, work.hidden_out.size());
  if (!part.ends() && !work.all_logits.empty())
    throw ArgumentError(concat("logits: expected no room for them with ", part.layers_named(),
                               ", which have hidden rows in their place, found ", work.all_logits.size()));
  if (part.begins()) return;
  if (const std::optional<size_t> odd = first_not_finite(work.hidden_in))
    throw ArgumentError(concat("hidden_in: expected finite numbers, found ", work.hidden_in[*odd], " in row ",
                               *odd / static_cast<size_t>(part.row_width())));
}

}  // namespace moeflux
