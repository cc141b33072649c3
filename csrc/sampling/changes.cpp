#include "sampling/changes.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "sampling/cut.h"

namespace moeflux {

using cpu::choice_block;
using cpu::choice_lanes;

Changes::Changes(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt)
    : penalties_{sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty},
      has_penalties_(penalties_.repetition != 1 || penalties_.presence != 0 || penalties_.frequency != 0),
      none_(!has_penalties_ && sampling.logit_bias.empty()),
      unchanged_(static_cast<size_t>(cpu::choice_blocks(vocab_size) * cpu::choice_words), ~uint32_t{0}),
      counts_(static_cast<size_t>(cpu::choice_blocks(vocab_size))),
      room_(none_ ? 0 : counts_.size() * choice_block),
      places_(new int32_t[room_]),
      times_(new int32_t[room_]),
      biases_(sampling.logit_bias.empty() ? nullptr : new double[room_]) {
  if (none_) return;
  if (penalties_.repetition != 1)
    for (const int32_t token : prompt) touch(token);
  const std::vector<uint32_t> unseen = unchanged_;
  for (const auto& [token, bias] : sampling.logit_bias) touch(token);
  for (size_t word = 0; word < unseen.size(); ++word)
    for (uint32_t rest = ~unchanged_[word]; rest != 0; rest &= rest - 1) {
      const int bit = std::countr_zero(rest);
      const auto block = static_cast<int64_t>(word) / cpu::choice_words;
      const auto place = static_cast<int32_t>(word % cpu::choice_words) * 32 + bit;
      insert(block, counts_[static_cast<size_t>(block)], place, (unseen[word] >> bit & 1) != 0 ? 0 : cpu::seen_before);
    }
  for (const auto& [token, bias] : sampling.logit_bias) biases_[static_cast<size_t>(find(token))] += bias;
}

// Where the token is in the lists, or where it belongs.
int64_t Changes::find(int32_t token) const {
  const int64_t block = token / choice_block;
  const int32_t* const begin = places_.get() + block * choice_block;
  const int32_t* const end = begin + counts_[static_cast<size_t>(block)];
  return std::lower_bound(begin, end, token % choice_block) - places_.get();
}

void Changes::insert(int64_t block, int64_t at, int32_t place, int32_t times) {
  int32_t& count = counts_[static_cast<size_t>(block)];
  const auto put = [&](auto* lists, auto value) {
    auto* const list = lists + block * choice_block;
    if (count % choice_lanes == 0) std::fill_n(list + count, choice_lanes, 0);  // what is behind the last one
    std::move_backward(list + at, list + count, list + count + 1);
    list[at] = value;
  };
  put(places_.get(), place);
  put(times_.get(), times);
  if (biases_) put(biases_.get(), 0.0);
  ++count;
}

void Changes::count(int32_t token) {
  if (!has_penalties_) return;
  const int64_t block = token / choice_block;
  const int64_t at = find(token);
  const uint32_t word = unchanged_[static_cast<size_t>(token / 32)];
  if ((word >> (token % 32) & 1) != 0) {
    touch(token);
    insert(block, at - block * choice_block, static_cast<int32_t>(token % choice_block), cpu::seen_before);
  }
  int32_t& times = times_[static_cast<size_t>(at)];
  times = (times | cpu::seen_before) + 1;
}

cpu::ChangedPlaces Changes::of(int64_t block) const {
  const int64_t first = block * choice_block;
  return {places_.get() + first, times_.get() + first, biases_ ? biases_.get() + first : nullptr,
          counts_[static_cast<size_t>(block)]};
}

int64_t Changes::bytes() const {
  return bytes_of(unchanged_, counts_) +
         static_cast<int64_t>(room_ * (2 * sizeof(int32_t) + (biases_ ? sizeof(double) : 0)));
}

}  // namespace moeflux
