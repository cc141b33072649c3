#include "sampling/changes.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include "sampling/cut.h"

namespace moeflux {

using cpu::choice_block;
using cpu::choice_lanes;

namespace {

// So many tokens of the prompt in a block are listed like those of the answer. To look at all of the block's bits takes
// as long as a longer list.
constexpr int64_t few_seen = choice_block / 16;

__extension__ typedef unsigned __int128 Wide;

// Is every f32 number times the reciprocal, which is y = 1 / penalty rounded and then its rounding error, e = 1 - y *
// penalty, times y, the quotient rounded once? With the penalty's 53 bits R, a number's 24 bits V, and rounding after
// 53 bits, that fails at most where a quotient is nearer to the middle M of two numbers than 3 / 2^106 of itself:
// |M * R - V * 2^k| <= 6, where M is odd and has 54 bits, and k is at least 81. It is never 0, since M does not divide
// V. Each other number has one M that is right modulo 2^81, nearly always a longer one.
bool divides_surely(double penalty) {
  constexpr int power = 81;
  constexpr int64_t nearest = 6;
  auto bits = (std::bit_cast<uint64_t>(penalty) & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52;
  const int zeros = std::countr_zero(bits);
  bits >>= zeros;
  Wide inverse = bits;  // of an odd number to three bits; each turn doubles them
  for (int turn = 0; turn < 6; ++turn) inverse *= 2 - bits * inverse;
  const Wide mask = (Wide{1} << (power - zeros)) - 1;
  for (int64_t distance = 1; distance <= nearest; ++distance) {
    if (distance % (int64_t{1} << std::min(zeros, 3)) != 0) continue;
    const Wide middle = inverse * static_cast<uint64_t>(distance >> zeros) & mask;
    if (middle < Wide{1} << 54 || (-middle & mask) < Wide{1} << 54) return false;
  }
  return true;
}

// So far from the ends of the range no step of a product or of a division leaves the normal numbers.
bool is_moderate(double penalty) { return penalty > 0x1p-100 && penalty < 0x1p+100; }

cpu::Penalties penalties_of(const Sampling& sampling) {
  cpu::Penalties found = {sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty};
  if (is_moderate(found.repetition) && divides_surely(found.repetition)) {
    found.reciprocal = 1 / found.repetition;
    found.rounded_by = std::fma(-found.reciprocal, found.repetition, 1) * found.reciprocal;
  }
  return found;
}

}  // namespace

Changes::Changes(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt)
    : penalties_(penalties_of(sampling)),
      has_penalties_(penalties_.repetition != 1 || penalties_.presence != 0 || penalties_.frequency != 0),
      none_(!has_penalties_ && sampling.logit_bias.empty()),
      seen_(static_cast<size_t>(cpu::choice_blocks(vocab_size) * cpu::choice_words)),
      any_seen_(static_cast<size_t>(cpu::choice_blocks(vocab_size))),
      left_alone_(seen_.size(), ~uint32_t{0}),
      counts_(any_seen_.size()),
      room_(none_ ? 0 : counts_.size() * static_cast<size_t>(changed_room)),
      places_(new int32_t[room_]),
      times_(new int32_t[room_]),
      biases_(sampling.logit_bias.empty() ? nullptr : new double[room_]) {
  if (penalties_.repetition != 1) see(prompt);
  for (const auto& [token, bias] : sampling.logit_bias)
    biases_[entry(token, is_seen(token) ? cpu::seen_before : 0)] += bias;
}

void Changes::see(std::span<const int32_t> prompt) {
  std::vector<int64_t> counts(counts_.size());
  for (const int32_t token : prompt) {
    if (is_seen(token)) continue;
    seen_[static_cast<size_t>(token / 32)] |= 1u << (token % 32);
    ++counts[static_cast<size_t>(token / choice_block)];
  }
  for (size_t block = 0; block < counts.size(); ++block) any_seen_[block] = counts[block] > few_seen;
  for (size_t word = 0; word < seen_.size(); ++word) {
    if (any_seen_[word / cpu::choice_words]) {
      left_alone_[word] &= ~seen_[word];
      continue;
    }
    for (uint32_t rest = seen_[word]; rest != 0; rest &= rest - 1)
      entry(static_cast<int32_t>(32 * word) + std::countr_zero(rest), cpu::seen_before);
  }
}

// Where the token is in the lists; with so many `times`, and no bias, where it was not.
size_t Changes::entry(int32_t token, int32_t times) {
  const int64_t block = token / choice_block;
  const auto place = static_cast<int32_t>(token % choice_block);
  int32_t& count = counts_[static_cast<size_t>(block)];
  const int32_t* const places = places_.get() + block * changed_room;
  const int64_t at = std::lower_bound(places, places + count, place) - places;
  const auto found = static_cast<size_t>(block * changed_room + at);
  if (at < count && places[at] == place) return found;
  const auto put = [&](auto* lists, auto value) {
    auto* const list = lists + block * changed_room;
    if (count % choice_lanes == 0) std::fill_n(list + count, choice_lanes, 0);  // what is behind the last one
    std::move_backward(list + at, list + count, list + count + 1);
    list[at] = value;
  };
  put(places_.get(), place);
  put(times_.get(), times);
  if (biases_) put(biases_.get(), 0.0);
  seen_[static_cast<size_t>(token / 32)] &= ~(1u << (token % 32));
  left_alone_[static_cast<size_t>(token / 32)] &= ~(1u << (token % 32));
  ++count;
  return found;
}

void Changes::count(int32_t token) {
  if (!has_penalties_) return;
  int32_t& times = times_[entry(token, 0)];
  times = (times | cpu::seen_before) + 1;
}

cpu::ChangedPlaces Changes::of(int64_t block) const {
  const int64_t first = block * changed_room;
  return {places_.get() + first, times_.get() + first, biases_ ? biases_.get() + first : nullptr,
          counts_[static_cast<size_t>(block)]};
}

bool Changes::only_lower() const {
  return !biases_ && penalties_.repetition >= 1 && penalties_.presence >= 0 && penalties_.frequency >= 0;
}

// As ChoiceKernels have it.
double Changes::value(int32_t token, float logit) const {
  const int64_t block = token / choice_block;
  const auto place = static_cast<int32_t>(token % choice_block);
  const cpu::ChangedPlaces list = of(block);
  const int64_t at = std::lower_bound(list.places, list.places + list.count, place) - list.places;
  const bool is_listed = at < list.count && list.places[at] == place;
  const int32_t times = is_listed ? list.times[at] : seen(block) && is_seen(token) ? cpu::seen_before : 0;
  double value = logit;
  if (is_listed && list.biases) value += list.biases[at];
  if (times < 0) value = value > 0 ? value / penalties_.repetition : value * penalties_.repetition;
  const int32_t number = times & std::numeric_limits<int32_t>::max();
  return number > 0 ? value - (penalties_.presence + penalties_.frequency * number) : value;
}

void Changes::fetch(int64_t block) const {
  constexpr int64_t line = 64 / sizeof(int32_t);
  if (block == static_cast<int64_t>(counts_.size())) return;
  const cpu::ChangedPlaces list = of(block);
  for (int64_t i = 0; i < list.count; i += line) {
    __builtin_prefetch(list.places + i);
    __builtin_prefetch(list.times + i);
  }
}

int64_t Changes::bytes() const {
  return bytes_of(seen_, any_seen_, left_alone_, counts_) +
         static_cast<int64_t>(room_ * (2 * sizeof(int32_t) + (biases_ ? sizeof(double) : 0)));
}

}  // namespace moeflux
