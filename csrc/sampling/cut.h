// Cutting a vocabulary: its values go from the greatest down until their number, or the sum of their weights, is what
// was asked for. The lower place wins a tie.
//
// A vocabulary is not sorted. Where the cut will be is guessed from a few of the values; one pass sums up what is above
// that bracket and lists what is within; the list is cut. A wrong guess costs another pass and changes nothing. Nor is
// the list sorted: sums of what exceeds a value tell on which side of it the cut is.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kernels/cpu/choice.h"
#include "sampling/value_list.h"

namespace moeflux {

constexpr double infinity = std::numeric_limits<double>::infinity();

// What lists take of memory.
template <typename... Lists>
int64_t bytes_of(const Lists&... lists) {
  return static_cast<int64_t>(((lists.capacity() * sizeof(lists.front())) + ...));
}

// The number or 0, without a branch that nobody could foretell.
inline double when(bool wanted, double number) {
  return std::bit_cast<double>(std::bit_cast<uint64_t>(number) & (uint64_t{0} - wanted));
}

constexpr double log2_e = 1.4426950408889634;

// At the coldest temperatures all but the likeliest weigh nothing, as they should.
inline double choice_factor(double temperature) {
  return std::min(log2_e / temperature, std::numeric_limits<double>::max());
}

// Weights by this factor, relative to that of this number.
cpu::ChoiceScale choice_scale(double greatest, double factor);

struct Cut {
  double value = -infinity;
  int64_t last = std::numeric_limits<int64_t>::max();  // of those equal to the value, the last that stays

  bool keeps(double other, int64_t place) const { return other > value || (other == value && place <= last); }
};

struct Goal {
  enum Measure { number, sum };
  Measure measure;
  double amount;  // how many values, or the share of their weights in all weights' sum

  double of(double total) const { return measure == number ? amount : amount * total; }
};

using Bracket = cpu::ChoiceBracket;
struct ListCut {
  Cut cut;
  double before = 0;  // what those before the last one are worth
  double through = 0;
};

// The first of a list, the greatest first, that are worth `amount` or just more; all of them when that is not reached.
// They are within the bracket, and each is worth 1 unless the list says more.
ListCut cut_list(const cpu::ChoiceKernels& kernels, const ListedValues& list, const Bracket& bracket, double amount);

// Guesses brackets from probes: the greatest of each column of a block, its top, and samples of the other elements.
//
// Of the greatest values nearly all are tops. Where elements lie at random, -log(1 - c) of them a column are above a
// value when the share c of all columns has its top above it; the samples tell of the rest.
class Guess {
 public:
  Guess(const cpu::ChoiceKernels& kernels, int64_t columns);

  // The probes' values, as ChoiceKernels give them, and what each is worth: the tops', then the samples'. `greatest` is
  // the greatest of all values. -inf is an end that nothing is known of.
  Bracket bracket(std::span<const float> tops, std::span<const float> samples, std::span<const double> worths,
                  double greatest, const Goal& goal);
  // What all values are worth, by the last guess.
  double total() const { return total_; }
  int64_t bytes() const { return bytes_of(ranks_, probes_, buckets_, other_samples_, sums_); }

 private:
  // Probes of about the same value that are worth something.
  struct Some {
    double number = 0;
    double worth = 0;

    // The sum of the squares of what each is worth.
    double squares() const { return number > 0 ? worth * worth / number : 0; }
    void add(double other) {
      number += other > 0;
      worth += other;
    }
  };
  struct Bucket {
    Some tops;
    Some samples;

    // About what one of them is worth.
    double worth() const { return (tops.worth + samples.worth) / std::max(tops.number + samples.number, 1.0); }
  };
  // What they stand for.
  struct Estimate {
    double tops = 0;
    double hidden = 0;  // other elements as great
    double worth = 0;
    double variance = 0;
  };
  // Of the distance to the greatest value, as an integer: the greater the value, the lower.
  struct Ranks {
    uint32_t low;
    uint32_t high;
    int shift;  // to the number of a bucket

    bool has(uint32_t rank) const { return rank - low <= high - low; }
    size_t bucket(uint32_t rank) const { return (rank - low) >> shift; }
    uint32_t first_of(size_t bucket) const { return low + (static_cast<uint32_t>(bucket) << shift); }
  };

  void fill_buckets_with_all(std::span<const double> worths, const Ranks& ranks);
  void fill_buckets(std::span<const double> worths, const Ranks& ranks);
  std::span<uint32_t> probes() { return {probes_.data(), left_}; }
  void leave_probes(const Ranks& ranks);
  void estimate(Estimate sum);
  size_t bucket_at(double worth, size_t last) const;

  const cpu::ChoiceKernels& kernels_;
  size_t columns_;
  double total_ = 0;
  std::vector<uint32_t> ranks_;   // of the probes
  std::vector<uint32_t> probes_;  // which of them are looked at; the first `left_`
  size_t left_ = 0;
  std::vector<Bucket> buckets_;
  std::vector<Some> other_samples_;  // of the second samples
  std::vector<Estimate> sums_;       // through each bucket
};

}  // namespace moeflux
