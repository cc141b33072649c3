// The logits of one choice, a block at a time: where they lie, with bits of those that are forbidden or penalised and a
// list of the values that are something else; or only a list of the few that are left.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cpu/choice.h"
#include "sampling/changes.h"
#include "sampling/cut.h"
#include "sampling/value_list.h"

namespace moeflux {

constexpr float forbidden = -std::numeric_limits<float>::infinity();

inline int64_t whole_vectors(int64_t count) {
  return (count + cpu::choice_lanes - 1) / cpu::choice_lanes * cpu::choice_lanes;
}

// That of a number, where it is beyond them the last one that is finite.
inline float nearest_float(double number) {
  constexpr double most = std::numeric_limits<float>::max();
  return static_cast<float>(std::isinf(number) ? number : std::clamp(number, -most, most));
}

class LogitBlocks {
 public:
  // So many may be left by `keep`.
  static constexpr int64_t max_kept = 4096;

  LogitBlocks(const cpu::ChoiceKernels& kernels, int64_t vocab_size);

  // Of the next choice; looked at until the one after. `changes` null: none. ArgumentError naming a token whose value
  // is no number.
  void take(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed);
  // The same, and what follows is of the logits alone until `show_asked`. Returns the logarithm of the sum of exp(value
  // - greatest), that is made on the way of rough weights; NaN where it was not: of few logits, and of those that begin
  // too far below the greatest one.
  double take_with_sum(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed);
  // Of a vocabulary of one block: these values at the places that are their tokens, and no others.
  void take_listed(const ListedValues& list);
  // What follows is of the logits as they were asked for.
  void show_asked() { view_ = &asked_; }

  int64_t count() const { return count_; }
  // Are there so few values that guesses and rough weights save nothing?
  bool are_few() const;
  // Is there only what was kept?
  bool is_short() const { return short_; }
  // Are more tokens than this allowed?
  bool allows_more_than(int64_t number) const;
  // How many there are that can be chosen.
  int64_t count_values();
  // The greatest of all values, and one that none of a block exceeds; -inf where nothing can be chosen.
  double greatest() const { return view_->greatest; }
  double greatest(int64_t block) const { return view_->ranges[static_cast<size_t>(block)].most; }
  // The first token that has the greatest value.
  int32_t first_greatest();
  // As ChoiceKernels give them, of all blocks.
  std::span<const float> tops() const { return view_->tops; }
  std::span<const float> samples() const { return view_->samples; }

  // How values are weighed from here on.
  void set_scale(const cpu::ChoiceScale& scale, bool rough) {
    scale_ = scale;
    rough_ = rough && scale.can_be_rough();
  }

  // What follows is of this block, and of what the cut keeps.
  void open(int64_t block, const Cut& cut = {});
  // The sum of the weights.
  double weigh() { return weigh({infinity, infinity}, false).all; }
  double log_of(double sum) const;
  // Finds which values lie in a bracket. The sums of the weights; or how many exceed the bracket.
  cpu::ChoiceSums weigh(const Bracket& bracket) { return weigh(bracket, true); }
  int64_t find(const Bracket& bracket);
  int64_t count_found() const;
  // Lists them as this block's values. Those of the last block that was listed are values only when that was finished.
  void list_found(ValueList& list);
  void finish_list();
  // Every value at its place, -inf where there is none; and its weight.
  void spread();
  void spread_weights();
  double value(int64_t place) const { return wide_[static_cast<size_t>(place)]; }
  double weight(int64_t place) const { return weights_[static_cast<size_t>(place)]; }

  // Weights of other values than a block's, whole vectors of them; those of f32 below `least` weigh nothing.
  void weigh(std::span<const float> values, double least, double* weights) const;
  void weigh(std::span<const double> values, double* weights) const;

  // From here on there is only what the cut keeps. False, and nothing happens, where that may be more than `max_kept`.
  bool keep(const Cut& cut);
  ListedValues kept() const { return kept_.all(); }
  // All again.
  void keep_all() { short_ = false; }

  int64_t bytes() const;

 private:
  // What is known of logits to which something is done, or nothing.
  struct View {
    explicit View(int64_t blocks);

    float* tops_of(int64_t block) { return tops.data() + block * cpu::choice_columns; }
    float* samples_of(int64_t block) { return samples.data() + block * cpu::choice_samples * cpu::choice_columns; }

    const Changes* changes = nullptr;
    std::span<const uint32_t> allowed;
    double greatest = 0;
    std::vector<Bracket> ranges;  // of each block; no value is outside
    std::vector<float> tops;
    std::vector<float> samples;
  };
  // What was listed of a block and has yet to get the penalty.
  struct Pending {
    double* values = nullptr;
    const int32_t* tokens = nullptr;
    int64_t count = 0;
    const uint32_t* seen = nullptr;
  };
  struct KnownLogit {
    double value = std::numeric_limits<double>::quiet_NaN();
    double logit = 0;
  };

  void begin(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed);
  void look_at(int64_t block, View* own = nullptr);
  void look_at_changed(int64_t block, View* own);
  cpu::ChoiceRange range_of(int64_t block, const cpu::MarkedLogits& marked, View* own = nullptr);
  void find_greatest();
  double greatest_value(int64_t block);
  bool is_changed(int64_t block) const { return view_->changes && view_->changes->any(block); }
  void open_logits(int64_t block);
  void open_values();
  bool leaves_most(double least) const;
  float* tops_of(int64_t block) const { return view_->tops_of(block); }
  float* samples_of(int64_t block) const { return view_->samples_of(block); }
  double* changed_values(int64_t block) const { return changed_.get() + block * changed_room; }
  bool is_cut_short(int64_t block) const { return (block + 1) * cpu::choice_block > vocab_size_; }
  const uint32_t* allowed_of(int64_t block) const;
  const uint32_t* allowed_or_null(int64_t block) const;
  const float* logits_of(int64_t block) const;
  const float* next_of(int64_t block) const;
  void drop_ties(const Cut& cut);
  double weigh_own(int64_t block);
  cpu::ChoiceSums weigh(const Bracket& bracket, bool finds);
  cpu::ChoiceSums weigh_values(const double* values, int64_t count, const cpu::ChoiceScale& scale,
                               const Bracket& bracket, uint64_t* bits) const;
  cpu::ChoiceSums weigh_packed(const cpu::ChoiceScale& scale, const Bracket& bracket, bool finds);
  cpu::ChoiceSums weigh_penalized(const cpu::ChoiceScale& scale, const Bracket& bracket, bool finds);
  bool can_weigh_marked() const;
  const cpu::Penalties& penalties() const;
  cpu::MarkedBounds bounds_of(double least, const Bracket& bracket);
  Bracket logits_within(const Bracket& bracket);
  double least_logit(double value, KnownLogit& known) const;
  void add_found();
  void add_found_exceptions();
  template <typename Function>
  void each_found_exception(const Function& function) const;
  void list_exceptions(double* values) const;
  [[noreturn]] void refuse(int64_t block);

  const cpu::ChoiceKernels& kernels_;
  int64_t vocab_size_;
  int64_t count_;
  std::span<const float> logits_;
  std::vector<float> last_logits_;      // the last block where it is cut short, then -inf
  std::vector<uint32_t> last_allowed_;  // its part of the bit set
  View own_;                            // the model's
  View asked_;
  View* view_ = &asked_;
  const float* next_ = nullptr;        // what comes nearer while a block is looked at
  std::unique_ptr<double[]> changed_;  // values as Changes lists them; touched as far as there are some
  ValueList kept_;
  bool short_ = false;
  cpu::ChoiceScale scale_;
  bool rough_ = false;

  // The open block: its logits, with bits of those that are values as they are, and of others that have the repetition
  // penalty, and exceptions from both; or values, where only some are left, or ties were dropped.
  int64_t block_ = 0;
  cpu::MarkedLogits here_;  // its logits null: values
  cpu::ChangedPlaces exceptions_ = {};
  ListedValues values_ = {};  // tokens null: of the whole block
  double least_ = -infinity;  // what is less was cut
  double none_below_ = -infinity;
  std::vector<float> left_;   // logits of which something was left out
  std::vector<double> wide_;  // all values of the block
  std::vector<double> weights_;
  std::array<uint32_t, cpu::choice_words> bits_as_they_are_ = {};
  std::array<uint32_t, cpu::choice_words> bits_penalized_ = {};
  std::array<uint64_t, cpu::choice_long_words> found_ = {};
  std::array<uint64_t, cpu::choice_long_words> also_found_ = {};
  std::array<KnownLogit, 3> known_logits_;
  Pending pending_;
};

}  // namespace moeflux
