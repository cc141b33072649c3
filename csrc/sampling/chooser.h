// One choice: the cuts, the weights of what is left, and the draw.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sampling/blocks.h"
#include "sampling/cut.h"
#include "sampling/sampler.h"

namespace moeflux {

// Values and their tokens, in the order of the tokens: those that the cut keeps.
struct Best {
  ListedValues values;
  Cut cut;
};

class Chooser {
 public:
  Chooser(const cpu::ChoiceKernels& kernels, int64_t vocab_size);

  // The logits of a choice, as for LogitBlocks::take. What follows is of them.
  void take(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed);

  void take_listed(const ListedValues& list);

  // The same, but what follows is of the logits alone, whose `log_sum` will be asked for, until `show_asked`.
  void take_with_sum(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed);
  void show_asked();

  double greatest() const { return blocks_.greatest(); }
  // The logarithm of the sum of exp(value - greatest), within `rough_choice_error`. After a draw at temperature 1 it is
  // known already.
  double log_sum();
  // The `count` greatest values; at most LogitBlocks::max_kept. Good until the next choice.
  Best best(int64_t count);

  // The first of the likeliest.
  int32_t likeliest() { return blocks_.first_greatest(); }
  // Or one that chance picks, `uniform` in [0, 1); the temperature is above 0.
  int32_t draw(const Sampling& sampling, double uniform);

  // The same of a part of a vocabulary, whose greatest values are here: at most two blocks of them, and no top-k that
  // is not among these. Nothing where sums are so near each other that their order might matter.
  struct Others {
    double sum = 0;                // of all weights, with those that are here; 0: all are here
    double all_below = -infinity;  // the values that are not
  };
  std::optional<int32_t> draw_surely(const Sampling& sampling, double uniform, const Others& others);
  // The first whose weight, with all before it, exceeds `goal`; by weights relative to the greatest here, of which the
  // whole vocabulary has `total`.
  std::optional<int32_t> first_beyond(double temperature, double goal, double total);

  int64_t bytes() const;

 private:
  void begin();
  void set_temperature(double temperature);
  void weigh(bool rough);
  double weight_of(double value) const;
  void set_sum(double sum);
  void keep_best(int64_t count);
  double greatest_of_blocks(int64_t count);
  Cut keep_above(double floor);
  int32_t at(double share, const Cut& cut);
  int32_t at(size_t block, double before, double goal, double total, const Cut& cut);
  void has_all_from(double value);
  void compare_sums(double less, double more, double total);

  Cut find(const Goal& goal, double floor);
  ListCut cut_ties(double value, double worth, double amount);
  void add_listed(const Cut& cut);
  Bracket guess(const Goal& goal);
  double least_value(const Goal& goal, double total) const;

  const cpu::ChoiceKernels& kernels_;
  LogitBlocks blocks_;
  cpu::ChoiceScale scale_;
  // A draw by rough weights may be in doubt; it is made again with exact ones then.
  bool rough_ = false;
  bool sure_ = true;
  double summed_by_ = 0;  // with this factor; 0: not yet
  double sum_ = 0;        // the logarithm of all weights' sum
  double log_sum_ = 0;    // that was made while taking them; NaN: none was
  Others others_;         // 0: none
  Cut best_;              // what top-k left, where that is more than `max_kept`
  Guess guess_;
  std::vector<double> worths_;  // of the probes
  std::vector<double> kept_;    // of each block, what the values that are kept are worth
  std::vector<double> within_;  // and those in a bracket of one value
  ValueList listed_;            // in the bracket
};

}  // namespace moeflux
