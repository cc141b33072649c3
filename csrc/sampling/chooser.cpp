#include "sampling/chooser.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace moeflux {

using cpu::choice_block;

namespace {

constexpr double lowest = std::numeric_limits<double>::lowest();

}  // namespace

Chooser::Chooser(const cpu::ChoiceKernels& kernels, int64_t vocab_size)
    : kernels_(kernels),
      blocks_(kernels, vocab_size),
      guess_(kernels, static_cast<int64_t>(blocks_.tops().size())),
      worths_(blocks_.tops().size() + blocks_.samples().size()),
      kept_(static_cast<size_t>(cpu::choice_blocks(vocab_size))),
      within_(kept_.size()),
      listed_(vocab_size, vocab_size, true) {}

int64_t Chooser::bytes() const {
  return blocks_.bytes() + guess_.bytes() + bytes_of(worths_, kept_, within_) + listed_.bytes();
}

void Chooser::take(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed) {
  blocks_.take(logits, changes, allowed);
  begin();
}

void Chooser::take_listed(const ListedValues& list) {
  blocks_.take_listed(list);
  begin();
}

void Chooser::take_with_sum(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed) {
  const double sum = blocks_.take_with_sum(logits, changes, allowed);
  begin();
  log_sum_ = sum;
}

void Chooser::show_asked() {
  blocks_.show_asked();
  begin();
}

// Nothing is known of what the blocks show.
void Chooser::begin() {
  log_sum_ = std::numeric_limits<double>::quiet_NaN();
  best_ = {};
  summed_by_ = 0;
}

int32_t Chooser::draw(const Sampling& sampling, double uniform) {
  set_temperature(sampling.temperature);
  const double floor =
      sampling.min_p > 0 ? std::max(blocks_.greatest() + std::log2(sampling.min_p) / scale_.factor, lowest) : lowest;
  if (sampling.top_k > 0 && blocks_.allows_more_than(sampling.top_k)) keep_best(sampling.top_k);
  for (bool rough = !blocks_.are_few();; rough = false) {
    weigh(rough);
    sure_ = true;
    const Cut cut = sampling.top_p < 1 ? find({Goal::sum, sampling.top_p}, floor) : keep_above(floor);
    const int32_t token = at(uniform, cut);
    if (sure_ || !rough) return token;
  }
}

std::optional<int32_t> Chooser::draw_surely(const Sampling& sampling, double uniform, const Others& others) {
  others_ = others;
  const int32_t token = draw(sampling, uniform);
  others_ = {};
  if (!sure_) return std::nullopt;
  return token;
}

std::optional<int32_t> Chooser::first_beyond(double temperature, double goal, double total) {
  set_temperature(temperature);
  weigh(false);
  sure_ = true;
  const int32_t token = at(0, 0, goal, total, {lowest});
  if (!sure_) return std::nullopt;
  return token;
}

double Chooser::log_sum() {
  if (!std::isnan(log_sum_)) return log_sum_;
  blocks_.keep_all();
  best_ = {};
  set_temperature(1);
  if (summed_by_ != scale_.factor) {
    weigh(!blocks_.are_few());
    keep_above(lowest);
  }
  return sum_;
}

Best Chooser::best(int64_t count) {
  const auto amount = static_cast<double>(count);
  Cut cut = {count > blocks_.count() ? -infinity : greatest_of_blocks(count)};
  // As many blocks have a value from there on, and few others, unless many are equal.
  if (cut.value > -infinity && blocks_.keep(cut)) {
    ListedValues list = blocks_.kept();
    cut = cut_list(kernels_, list, {cut.value, blocks_.greatest()}, amount).cut;
  } else {
    cut = find({Goal::number, amount}, lowest);
    blocks_.keep(cut);
  }
  blocks_.keep_all();
  return {blocks_.kept(), cut};
}

// The greatest values of all blocks, in their order: the last of so many.
double Chooser::greatest_of_blocks(int64_t count) {
  const auto begin = worths_.begin();
  for (int64_t block = 0; block < blocks_.count(); ++block)
    worths_[static_cast<size_t>(block)] = blocks_.greatest(block);
  std::nth_element(begin, begin + (count - 1), begin + blocks_.count(), std::greater());
  return worths_[static_cast<size_t>(count - 1)];
}

void Chooser::set_temperature(double temperature) {
  scale_ = choice_scale(blocks_.greatest(), choice_factor(temperature));
}

void Chooser::weigh(bool rough) {
  rough_ = rough;
  blocks_.set_scale(scale_, rough);
}

double Chooser::weight_of(double value) const {
  std::array<double, cpu::choice_lanes> values;
  std::array<double, cpu::choice_lanes> weights;
  values.fill(value);
  blocks_.weigh(values, weights.data());
  return weights[0];
}

void Chooser::keep_best(int64_t count) {
  const Cut cut = find({Goal::number, static_cast<double>(count)}, lowest);
  if (count <= LogitBlocks::max_kept)
    blocks_.keep(cut);
  else if (cut.value > lowest)
    best_ = cut;
}

// What all values are worth, with the weights of now.
void Chooser::set_sum(double sum) {
  if (best_.value > -infinity || blocks_.is_short()) return;
  summed_by_ = scale_.factor;
  sum_ = blocks_.log_of(sum);
}

// Of a part of a vocabulary, the values that others may have do not tell.
void Chooser::has_all_from(double value) { sure_ &= others_.sum == 0 || value >= others_.all_below; }

// Two sums of which one has to be the greater: near each other, rough weights do not tell which.
void Chooser::compare_sums(double less, double more, double total) {
  sure_ &= more - less > 3 * cpu::rough_choice_error * total;
}

// ---- The draw -------------------------------------------------------------------------------------------------------

// All values from `floor` on that top-k left. Leaves in `kept_` what they are worth, as `find` does.
Cut Chooser::keep_above(double floor) {
  const Cut cut = best_.value >= floor ? best_ : Cut{floor};
  const bool every = cut.value == lowest;
  has_all_from(cut.value);
  for (int64_t block = 0; block < blocks_.count(); ++block) {
    double& kept = kept_[static_cast<size_t>(block)];
    kept = 0;
    if (blocks_.greatest(block) < cut.value) continue;
    blocks_.open(block, cut);
    kept = blocks_.weigh();
  }
  if (every) set_sum(std::accumulate(kept_.begin(), kept_.end(), 0.0));
  return cut;
}

// The first token at which the sum of what is kept exceeds its share of it all; the last one where rounding hides it.
int32_t Chooser::at(double share, const Cut& cut) {
  const auto count = static_cast<size_t>(blocks_.count());
  const double total = std::accumulate(kept_.data(), kept_.data() + count, 0.0);
  const double goal = share * total;
  size_t chosen = 0;
  double before = 0;
  double sum = 0;
  for (size_t block = 0; block < count && sum <= goal; ++block) {
    if (kept_[block] == 0) continue;
    chosen = block;
    before = sum;
    sum += kept_[block];
  }
  return at(chosen, before, goal, total, cut);
}

// The same where the block is known, and what those before it are worth.
int32_t Chooser::at(size_t block, double before, double goal, double total, const Cut& cut) {
  const auto first = static_cast<int64_t>(block) * choice_block;
  blocks_.open(static_cast<int64_t>(block));
  blocks_.spread();
  blocks_.spread_weights();
  double sum = before;
  int64_t place = 0;
  for (int64_t i = 0; i < choice_block && sum <= goal; ++i) {
    const double weight = blocks_.weight(i);
    if (weight == 0 || !cut.keeps(blocks_.value(i), first + i)) continue;
    place = i;
    before = sum;
    sum += weight;
  }
  compare_sums(before, goal, total);
  compare_sums(goal, sum, total);
  return static_cast<int32_t>(first + place);
}

// ---- Cuts -----------------------------------------------------------------------------------------------------------

// Nothing below `floor` is kept. Leaves in `kept_` what the kept values are worth, block by block.
Cut Chooser::find(const Goal& goal, double floor) {
  const bool weighed = goal.measure == Goal::sum;
  Bracket bracket = guess(goal);
  if (!weighed && bracket.least == lowest && !blocks_.are_few() &&
      static_cast<double>(blocks_.count_values()) <= goal.amount)
    return {lowest};
  for (int turn = 0;; ++turn) {
    bracket = {std::max(bracket.least, floor), std::max(bracket.most, floor)};
    const bool listed = bracket.least < bracket.most;
    listed_.clear();
    double above = 0;
    double all = 0;
    double tied = 0;
    const double tie_worth = weighed && !listed ? weight_of(bracket.most) : 1;
    for (int64_t block = 0; block < blocks_.count(); ++block) {
      double& own_above = kept_[static_cast<size_t>(block)];
      double& own_within = within_[static_cast<size_t>(block)];
      own_above = own_within = 0;
      if (blocks_.greatest(block) < (weighed ? best_.value : bracket.least)) {
        if (listed) listed_.end(block, 0);
        continue;
      }
      blocks_.open(block, best_);
      if (weighed) {
        const cpu::ChoiceSums sums = blocks_.weigh(bracket);
        own_above = sums.above;
        all += sums.all;
      } else {
        own_above = static_cast<double>(blocks_.find(bracket));
      }
      if (listed) {
        blocks_.list_found(listed_);
      } else if (const int64_t count = blocks_.count_found(); count > 0) {
        own_within = tie_worth * static_cast<double>(count);
        tied += own_within;
      }
      above += own_above;
    }
    blocks_.finish_list();
    if (weighed && others_.sum > 0) all = others_.sum;
    if (weighed) set_sum(all);
    const double amount = goal.of(all);
    // So far beyond a bracket that missed the next one goes.
    const double far = listed ? (bracket.most - bracket.least) * (turn == 0 ? 1 : 8) : infinity;
    if (above >= amount) {
      bracket = {std::nextafter(bracket.most, infinity), std::min(bracket.most + far, blocks_.greatest())};
    } else {
      ListedValues list = listed_.all();
      if (weighed)
        blocks_.weigh(std::span(list.values, list.count), listed_.worths());
      else
        list.worths = nullptr;
      const ListCut found = listed ? cut_list(kernels_, list, bracket, amount - above)
                                   : cut_ties(bracket.most, tie_worth, amount - above);
      if (listed && weighed) add_listed(found.cut);
      const double through = above + found.through;
      if (through >= amount) {
        const bool all_equal = !listed && above == 0 && tied == all;  // and so are their errors
        if (weighed && !all_equal) {
          compare_sums(above + found.before, amount, all);
          compare_sums(amount, through, all);
        }
        return found.cut;
      }
      if (bracket.least <= floor) {
        if (weighed) compare_sums(through, amount, all);
        has_all_from(floor);
        return best_.value >= floor ? best_ : Cut{floor};
      }
      bracket = {std::max(least_value(goal, all), bracket.least - far), std::nextafter(bracket.least, -infinity)};
    }
    if (turn > 2) bracket = {floor, blocks_.greatest()};  // where nothing can be missed
  }
}

// Adds to `kept_` what the cut keeps of the list.
void Chooser::add_listed(const Cut& cut) {
  for (int64_t block = 0; block < blocks_.count(); ++block) {
    const ListedValues list = listed_.of(block);
    if (list.count == 0) continue;
    const int64_t first = block * choice_block;
    const bool ties = first <= cut.last;
    double& kept = kept_[static_cast<size_t>(block)];
    if (ties && cut.last < first + choice_block) {
      for (size_t i = 0; i < list.count; ++i) kept += when(cut.keeps(list.values[i], list.tokens[i]), list.worths[i]);
      continue;
    }
    const double value = ties ? std::nextafter(cut.value, -infinity) : cut.value;
    kept += kernels_.sum_above(list.values, list.worths, static_cast<int64_t>(list.count), value).worth;
  }
}

// The first of those with this value that are worth `amount` together, `worth` each.
ListCut Chooser::cut_ties(double value, double worth, double amount) {
  ListCut found = {{value, -1}, 0, 0};
  for (int64_t block = 0; block < blocks_.count() && found.through < amount; ++block) {
    const double within = within_[static_cast<size_t>(block)];
    double& kept = kept_[static_cast<size_t>(block)];
    if (found.through + within < amount) {
      found.through += within;
      kept += within;
      continue;
    }
    blocks_.open(block);
    blocks_.spread();
    for (int64_t i = 0; i < choice_block && found.through < amount; ++i) {
      if (blocks_.value(i) != value) continue;
      found = {{value, block * choice_block + i}, found.through, found.through + worth};
      kept += worth;
    }
  }
  return found;
}

Bracket Chooser::guess(const Goal& goal) {
  const Bracket all = {lowest, blocks_.greatest()};
  if (blocks_.are_few()) return all;
  const std::span<const float> tops = blocks_.tops();
  const std::span<const float> samples = blocks_.samples();
  if (goal.measure == Goal::number) {
    std::fill(worths_.begin(), worths_.end(), 1.0);
  } else {
    blocks_.weigh(tops, best_.value, worths_.data());
    blocks_.weigh(samples, best_.value, worths_.data() + tops.size());
  }
  const Bracket found = guess_.bracket(tops, samples, worths_, blocks_.greatest(), goal);
  return {found.least > -infinity ? found.least : least_value(goal, guess_.total() / 2), found.most};
}

// Of all values, worth `total`, none below this is before the cut: together those are worth less than what it leaves.
double Chooser::least_value(const Goal& goal, double total) const {
  if (goal.measure == Goal::number) return lowest;
  const double weight = (total - goal.of(total)) / static_cast<double>(blocks_.count() * choice_block);
  const double value = blocks_.greatest() + (std::log2(weight) - 1) / scale_.factor;
  return value >= lowest ? value : lowest;
}

}  // namespace moeflux
