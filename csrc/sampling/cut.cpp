#include "sampling/cut.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>

#include "kernels/cpu/choice.h"

namespace moeflux {

namespace {

// By how many bits integers from `low` to `high` are shifted to fall into 2^bits buckets.
template <typename Integer>
int shift_for(Integer low, Integer high, int bits) {
  return std::max(0, static_cast<int>(std::bit_width(high - low)) - bits);
}

}  // namespace

cpu::ChoiceScale choice_scale(double greatest, double factor) {
  constexpr double lowest = std::numeric_limits<double>::lowest();
  double least = std::max(greatest + cpu::least_choice_exponent / factor, lowest);
  while ((least - greatest) * factor < cpu::least_choice_exponent) least = std::nextafter(least, infinity);
  return {greatest, factor, least, std::nearbyint(greatest * factor * 8) / 8};
}

// ---- A list ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t few = 48;  // so many are sorted
// So many are copied from the list, and looked at alone from there on.
constexpr int64_t apart = 512;

// The order of numbers as that of integers. Both zeros are one number.
uint64_t rank_of(double value) {
  const auto bits = std::bit_cast<uint64_t>(value + 0.0);
  return bits ^ (static_cast<uint64_t>(static_cast<int64_t>(bits) >> 63) | uint64_t{1} << 63);
}

double ranked(uint64_t rank) {
  return std::bit_cast<double>(rank ^ (rank >> 63 != 0 ? uint64_t{1} << 63 : ~uint64_t{0}));
}

// The part of a list where its cut is: the values from `least` to `most`.
class CutPart {
 public:
  CutPart(const cpu::ChoiceKernels& kernels, const ListedValues& list, const Bracket& bracket, double amount)
      : kernels_(kernels), list_(list), amount_(amount), least_(bracket.least), most_(bracket.most) {
    const cpu::ChoiceAbove all = above(-infinity);
    through_ = all.worth;
    number_ = all.number;
  }

  double before() const { return before_; }    // what those above it are worth
  double through() const { return through_; }  // and with those of the part
  int64_t number() const { return number_; }
  bool is_one_value() const { return least_ == most_; }

  // Leaves those that exceed a value, or the others: where the cut is.
  void narrow(double value) {
    if (value < least_ || value >= most_) return;
    const cpu::ChoiceAbove found = above(value);
    if (found.worth < amount_) {
      most_ = value;
      before_ = found.worth;
      number_ -= found.number - number_before_;
      number_before_ = found.number;
    } else {
      least_ = std::nextafter(value, infinity);
      through_ = found.worth;
      number_ = found.number - number_before_;
    }
  }

  // Where they are few of a list, only these are looked at from here on.
  void copy() {
    if (number_ > apart || list_.count <= own_values_.size()) return;
    size_t count = 0;
    each([&](size_t i) {
      own_values_[count] = list_.values[i];
      own_tokens_[count] = list_.tokens[i];
      if (list_.worths) own_worths_[count] = list_.worths[i];
      ++count;
      return false;
    });
    for (; count % cpu::choice_lanes != 0; ++count) {
      own_values_[count] = -infinity;
      own_worths_[count] = 0;
    }
    list_ = {own_values_.data(), own_tokens_.data(), count, list_.worths ? own_worths_.data() : nullptr};
    left_out_ = {before_, number_before_};
  }
  const ListedValues& list() const { return list_; }

  // The value where a sum would be if the part were spread evenly.
  double value_at(double sum) const {
    const double share = std::clamp((sum - before_) / (through_ - before_), 0.0, 1.0);
    return std::lerp(most_, least_, share);
  }
  // That which halves the numbers that there are.
  double middle() const { return ranked(rank_of(least_) + (rank_of(most_) - rank_of(least_)) / 2); }

  // To its own values.
  void shrink() {
    Bracket own = {infinity, -infinity};
    each([&](size_t i) {
      own = {std::min(own.least, list_.values[i]), std::max(own.most, list_.values[i])};
      return false;
    });
    least_ = own.least;
    most_ = own.most;
  }

  // Calls the function with the index of each, in their order, until it returns true.
  template <typename Function>
  void each(const Function& function) const {
    std::array<uint64_t, cpu::choice_long_words> bits;
    for (size_t first = 0; first < list_.count; first += cpu::choice_block) {
      const size_t count = std::min<size_t>(list_.count - first, cpu::choice_block);
      const size_t words = (count + 63) / 64;
      bits[words - 1] = 0;
      kernels_.find_values(list_.values + first, static_cast<int64_t>(count), {least_, most_}, bits.data());
      for (size_t word = 0; word < words; ++word)
        for (uint64_t rest = bits[word]; rest != 0; rest &= rest - 1)
          if (function(first + 64 * word + static_cast<size_t>(std::countr_zero(rest)))) return;
    }
  }

 private:
  cpu::ChoiceAbove above(double value) const {
    const cpu::ChoiceAbove found =
        kernels_.sum_above(list_.values, list_.worths, static_cast<int64_t>(list_.count), value);
    return {left_out_.worth + found.worth, left_out_.number + found.number};
  }

  const cpu::ChoiceKernels& kernels_;
  ListedValues list_;
  double amount_;
  double least_;
  double most_;
  double before_ = 0;
  double through_;
  int64_t number_before_ = 0;
  int64_t number_;
  cpu::ChoiceAbove left_out_ = {0, 0};  // those above what was copied
  std::array<double, apart> own_values_;
  std::array<double, apart> own_worths_;
  std::array<int32_t, apart> own_tokens_;
};

struct Listed {
  double value;
  double worth;
  int32_t token;
};

}  // namespace

ListCut cut_list(const cpu::ChoiceKernels& kernels, const ListedValues& list, const Bracket& bracket, double amount) {
  CutPart part(kernels, list, bracket, amount);
  if (part.through() < amount) return {{}, part.before(), part.through()};
  while (part.number() > few && !part.is_one_value()) {
    // From both sides of where the cut should be: of so many at random, about the root are missing or too many.
    const auto number = static_cast<double>(part.number());
    const double doubt = (part.through() - part.before()) / std::sqrt(number);
    part.narrow(part.value_at(amount - doubt));
    part.narrow(part.value_at(amount + doubt));
    part.copy();
    if (static_cast<double>(part.number()) <= number / 2) continue;
    part.shrink();
    part.narrow(part.middle());
  }
  ListCut found = {{}, part.before(), part.before()};
  const auto take = [&](const Listed& each) {
    found = {{each.value, each.token}, found.through, found.through + each.worth};
    return found.through >= amount;
  };
  const auto listed = [&](size_t i) {
    const ListedValues& own = part.list();
    return Listed{own.values[i], own.worths ? own.worths[i] : 1, own.tokens[i]};
  };
  if (part.is_one_value()) {
    part.each([&](size_t i) { return take(listed(i)); });
  } else {
    std::array<Listed, few> sorted;
    auto end = sorted.begin();
    part.each([&](size_t i) {
      *end++ = listed(i);
      return false;
    });
    std::sort(sorted.begin(), end, [](const Listed& a, const Listed& b) {
      return a.value > b.value || (a.value == b.value && a.token < b.token);
    });
    for (auto each = sorted.begin(); each != end && !take(*each);) ++each;
  }
  found.through = std::max(found.through, std::min(part.through(), amount));  // added up in another order
  return found;
}

// ---- Guessing -------------------------------------------------------------------------------------------------------

namespace {

constexpr int guess_bits = 8;
// Distances to the greatest value, from 0 and from the least that is told from it to the last that is told from others.
constexpr float nearest = 0x1p-20f;
constexpr float farthest = 0x1.fffffep+11f;
constexpr int max_turns = 3;
constexpr double deviations = 2.5;
constexpr double rare = 0.02;  // so few hidden elements are taken for none
// Of the columns: when more of them have their tops above a value, samples tell more than tops.
constexpr double crowded = 0.8;
// So many elements of its column a sample stands for.
constexpr double others = static_cast<double>(cpu::choice_rows - 1) / cpu::choice_samples;

}  // namespace

Guess::Guess(const cpu::ChoiceKernels& kernels, int64_t columns)
    : kernels_(kernels),
      columns_(static_cast<size_t>(columns)),
      ranks_(columns_ * (1 + cpu::choice_samples)),
      probes_(ranks_.size() + cpu::spare_packed),
      buckets_(size_t{1} << guess_bits),
      other_samples_(buckets_.size()),
      sums_(buckets_.size()) {}

// All probes. Neighbours often are of one bucket and would wait for each other: a top and its samples go to three
// places.
void Guess::fill_buckets_with_all(std::span<const double> worths, const Ranks& ranks) {
  std::fill(buckets_.begin(), buckets_.end(), Bucket{});
  std::fill(other_samples_.begin(), other_samples_.end(), Some{});
  static_assert(cpu::choice_samples == 2);
  const uint32_t* const samples = ranks_.data() + columns_;
  const double* const worths_of_samples = worths.data() + columns_;
  for (size_t i = 0; i < columns_; ++i) {
    buckets_[ranks.bucket(ranks_[i])].tops.add(worths[i]);
    buckets_[ranks.bucket(samples[i])].samples.add(worths_of_samples[i]);
    other_samples_[ranks.bucket(samples[columns_ + i])].add(worths_of_samples[columns_ + i]);
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    buckets_[i].samples.number += other_samples_[i].number;
    buckets_[i].samples.worth += other_samples_[i].worth;
  }
}

// Those that are left.
void Guess::fill_buckets(std::span<const double> worths, const Ranks& ranks) {
  std::fill(buckets_.begin(), buckets_.end(), Bucket{});
  size_t i = 0;
  for (; i < left_ && probes_[i] < columns_; ++i)
    buckets_[ranks.bucket(ranks_[probes_[i]])].tops.add(worths[probes_[i]]);
  for (; i < left_; ++i) buckets_[ranks.bucket(ranks_[probes_[i]])].samples.add(worths[probes_[i]]);
}

void Guess::leave_probes(const Ranks& ranks) {
  size_t count = 0;
  for (const uint32_t probe : probes()) {
    probes_[count] = probe;
    count += ranks.has(ranks_[probe]);
  }
  left_ = count;
}

// `sum` is above the first bucket.
void Guess::estimate(Estimate sum) {
  const auto columns = static_cast<double>(columns_);
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket& bucket = buckets_[i];
    if (bucket.tops.number == 0 && bucket.samples.number == 0) {
      sums_[i] = sum;
      continue;
    }
    const double above = sum.tops + bucket.tops.number / 2;
    sum.tops += bucket.tops.number;
    if (sum.tops < crowded * columns) {
      const double each = columns / (columns - above);
      sum.hidden += (each - 1) * bucket.tops.number;
      sum.worth += each * bucket.tops.worth;
      sum.variance += (each - 1) * bucket.tops.squares();
    } else {
      sum.worth += bucket.tops.worth + others * bucket.samples.worth;
      sum.variance += others * others * bucket.samples.squares();
    }
    sums_[i] = sum;
  }
}

// The bucket with which the sum reaches `worth`, at most `last`.
size_t Guess::bucket_at(double worth, size_t last) const {
  const auto found = std::partition_point(sums_.begin(), sums_.begin() + static_cast<std::ptrdiff_t>(last),
                                          [&](const Estimate& sum) { return sum.worth < worth; });
  return static_cast<size_t>(found - sums_.begin());
}

Bracket Guess::bracket(std::span<const float> tops, std::span<const float> samples, std::span<const double> worths,
                       double greatest, const Goal& goal) {
  const auto value_of = [&](size_t i) { return i < columns_ ? tops[i] : samples[i - columns_]; };
  const auto rank = [&](std::span<const float> probes, uint32_t* ranks) {
    kernels_.rank(probes.data(), static_cast<int64_t>(probes.size()), static_cast<float>(greatest), nearest, farthest,
                  ranks);
  };
  rank(tops, ranks_.data());
  rank(samples, ranks_.data() + columns_);
  // Each turn looks closer at where the sum passes the goal, until the bracket is as narrow as the doubt allows.
  constexpr auto low = std::bit_cast<uint32_t>(nearest);
  constexpr auto high = std::bit_cast<uint32_t>(farthest);
  Ranks ranks = {low, high, shift_for(low, high, guess_bits)};
  bool has_most = false;
  bool has_least = false;
  Estimate above;
  double all_variance = 0;
  for (int turn = 0; turn < max_turns; ++turn) {
    const size_t last = ranks.bucket(ranks.high);
    turn == 0 ? fill_buckets_with_all(worths, ranks) : fill_buckets(worths, ranks);
    estimate(above);
    if (turn == 0) {
      total_ = sums_.back().worth;
      all_variance = sums_.back().variance;
    }
    const double amount = goal.of(total_);
    const double share = amount / total_;
    const size_t place = bucket_at(amount, last);
    const double below = std::max(all_variance - sums_[place].variance, 0.0);
    const double variance = (1 - share) * (1 - share) * sums_[place].variance + share * share * below;
    double margin = deviations * std::sqrt(variance);
    if (sums_[place].hidden > rare) margin += buckets_[place].worth();

    const size_t first = bucket_at(amount - margin, last);
    const size_t end = bucket_at(amount + margin, last);
    has_most |= first > 0;
    has_least |= end < last || sums_[end].worth >= amount + margin;
    if (first > 0) above = sums_[first - 1];
    const double within = sums_[end].worth - above.worth;
    ranks.high = std::min(ranks.high, ranks.first_of(end + 1) - 1);
    ranks.low = ranks.first_of(first);
    if (turn == 0)
      left_ = static_cast<size_t>(kernels_.leave(ranks_.data(), worths.data(), static_cast<int64_t>(ranks_.size()),
                                                 ranks.low, ranks.high, probes_.data()));
    else
      leave_probes(ranks);
    if (ranks.shift == 0 || within <= 4 * margin) break;
    ranks.shift = shift_for(ranks.low, ranks.high, guess_bits);
  }
  Bracket found = {infinity, -infinity};
  for (const uint32_t i : probes()) {
    found.least = std::min<double>(found.least, value_of(i));
    found.most = std::max<double>(found.most, value_of(i));
  }
  const bool none = found.least > found.most;
  if (!has_most || none) found.most = greatest;
  if (!has_least || none) found.least = -infinity;
  return found;
}

}  // namespace moeflux
