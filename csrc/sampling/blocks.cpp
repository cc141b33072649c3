#include "sampling/blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "core/error.h"

namespace moeflux {

using cpu::choice_block;
using cpu::choice_columns;
using cpu::choice_samples;
using cpu::choice_words;

namespace {

constexpr float forbidden = -std::numeric_limits<float>::infinity();
constexpr int64_t few_blocks = 2;

constexpr double most_above = 500;  // of the range of exponents, far from its end

// Not the same of every block, for a vocabulary may have patterns.
int64_t row_of(int64_t block) { return block * 37 % cpu::choice_rows; }

// The f32 nearest to a number.
float near(double number) {
  constexpr double most = std::numeric_limits<float>::max();
  return static_cast<float>(std::isinf(number) ? number : std::clamp(number, -most, most));
}

// Not every machine that this is compiled for has an instruction, and the library's function takes longer.
int64_t count_bits(uint64_t word) {
  word -= word >> 1 & 0x5555555555555555;
  word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
  return static_cast<int64_t>(((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}

// What a near value may be off by.
double doubt(double value) {
  return std::isinf(value) ? 0 : std::abs(value) * cpu::near_choice_error + std::numeric_limits<float>::min();
}

}  // namespace

LogitBlocks::LogitBlocks(const cpu::ChoiceKernels& kernels, int64_t vocab_size)
    : kernels_(kernels),
      vocab_size_(vocab_size),
      count_(cpu::choice_blocks(vocab_size)),
      last_logits_(choice_block, forbidden),
      last_allowed_(choice_words),
      ranges_(static_cast<size_t>(count_)),
      tops_(ranges_.size() * choice_columns),
      samples_(tops_.size() * choice_samples),
      changed_(new double[static_cast<size_t>(count_ * choice_block)]),
      kept_(max_kept + 2 * choice_block, vocab_size),
      left_(choice_block),
      wide_(choice_block),
      left_of_list_(choice_block),
      weights_(choice_block),
      weights_at_(choice_block) {}

int64_t LogitBlocks::bytes() const {
  return bytes_of(last_logits_, last_allowed_, ranges_, tops_, samples_, left_, wide_, left_of_list_, weights_,
                  weights_at_) +
         count_ * choice_block * static_cast<int64_t>(sizeof(double)) + kept_.bytes();
}

// ---- All of them ----------------------------------------------------------------------------------------------------

void LogitBlocks::begin(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed) {
  logits_ = logits;
  changes_ = changes;
  allowed_ = allowed;
  const int64_t last = (count_ - 1) * choice_block;
  std::copy(logits.begin() + last, logits.end(), last_logits_.begin());
  if (!allowed.empty()) std::copy(allowed.begin() + last / 32, allowed.end(), last_allowed_.begin());
  short_ = false;
  greatest_ = forbidden;
}

void LogitBlocks::take(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed) {
  begin(logits, changes, allowed);
  for (int64_t block = 0; block < count_; ++block) look_at(block);
  if (changes) find_greatest();
}

// Weights may be of any number instead of the greatest, so long as none is too great for its exponent.
double LogitBlocks::take_with_sum(std::span<const float> logits) {
  begin(logits, nullptr, {});
  double sum = 0;
  for (int64_t block = 0; block < count_; ++block) {
    const bool is_first = greatest_ == -infinity;
    look_at(block);
    if (are_few() || greatest_ == -infinity) continue;
    if (is_first) set_scale(choice_scale(greatest_, log2_e), true);
    open(block);
    sum += weigh();
  }
  const double above = greatest_ - scale_.greatest;
  return are_few() || above > most_above ? std::numeric_limits<double>::quiet_NaN() : log_of(sum) - above;
}

void LogitBlocks::look_at(int64_t block) {
  if (is_changed(block)) return look_at_changed(block);
  const cpu::ChoiceRange range = range_of(block, plain_of(block));
  if (std::isnan(range.greatest)) refuse(block);
  ranges_[static_cast<size_t>(block)] = {range.least, range.greatest};
  greatest_ = std::max<double>(greatest_, range.greatest);
}

// At near values: the exact ones take longer. Where those are beyond f32 numbers, or the penalty is, at the exact ones.
void LogitBlocks::look_at_changed(int64_t block) {
  constexpr float most = std::numeric_limits<float>::max();
  const uint32_t* const seen = changes_->seen(block);
  const cpu::ChangedPlaces list = changes_->of(block);
  const cpu::Penalties& penalties = changes_->penalties();
  double* const values = changed_values(block);
  kernels_.change(logits_of(block), list, penalties, allowed_or_null(block), values);
  Bracket& found = ranges_[static_cast<size_t>(block)];
  if (!seen || penalties.reciprocal > 0) {
    kernels_.penalize_nearly(logits_of(block), seen, penalties, allowed_or_null(block), left_.data());
    for (int64_t i = 0; i < list.count; ++i) left_[static_cast<size_t>(list.places[i])] = near(values[i]);
    const cpu::ChoiceRange range = range_of(block, left_.data());
    found.least = range.least > -most ? range.least - doubt(range.least) : -infinity;
    found.most = range.greatest + doubt(range.greatest);
    if (range.greatest < most) return;
  }
  found = {-infinity, greatest_value(block)};
  std::transform(wide_.begin(), wide_.end(), left_.begin(), near);
  range_of(block, left_.data());
}

cpu::ChoiceRange LogitBlocks::range_of(int64_t block, const float* logits) {
  return kernels_.range(logits, logits_of(std::min(block + 1, count_ - 1)), row_of(block),
                        tops_.data() + block * choice_columns,
                        samples_.data() + block * choice_samples * choice_columns);
}

// Of those that may have it, in which values were changed.
void LogitBlocks::find_greatest() {
  for (;;) {
    const auto found = std::max_element(ranges_.begin(), ranges_.end(),
                                        [](const Bracket& a, const Bracket& b) { return a.most < b.most; });
    if (found->most <= greatest_) return;
    found->most = greatest_value(found - ranges_.begin());
    greatest_ = std::max(greatest_, found->most);
  }
}

double LogitBlocks::greatest_value(int64_t block) {
  open(block);
  const double greatest = kernels_.greatest_value(values_.values);
  if (std::isnan(greatest)) refuse(block);
  return greatest;
}

void LogitBlocks::refuse(int64_t block) {
  open(block);
  spread();
  int64_t place = 0;
  while (value(place) < infinity) ++place;
  const int64_t token = block * choice_block + place;
  const float logit = logits_[static_cast<size_t>(token)];
  if (!(logit < std::numeric_limits<float>::infinity()))
    throw ArgumentError(concat("logits[", token, "]: expected a number or -inf, found ", logit));
  throw ArgumentError(
      concat("penalties: expected numbers, found ", value(place), " made of logits[", token, "], ", logit));
}

bool LogitBlocks::are_few() const { return is_short() || count_ <= few_blocks; }

bool LogitBlocks::allows_more_than(int64_t number) const {
  if (allowed_.empty()) return vocab_size_ > number;
  int64_t count = 0;
  for (size_t word = 0; word < allowed_.size() && count <= number; ++word) count += count_bits(allowed_[word]);
  return count > number;
}

int64_t LogitBlocks::count_values() {
  int64_t count = 0;
  for (int64_t block = 0; block < count_; ++block) {
    open(block);
    count += find({-infinity, -infinity});
  }
  return count;
}

int32_t LogitBlocks::first_greatest() {
  for (int64_t block = 0;; ++block) {
    if (greatest(block) < greatest_) continue;
    open(block);
    spread();
    const auto found = std::find(wide_.begin(), wide_.end(), greatest_);
    if (found != wide_.end()) return static_cast<int32_t>(block * choice_block + (found - wide_.begin()));
  }
}

// ---- A block --------------------------------------------------------------------------------------------------------

const uint32_t* LogitBlocks::allowed_or_null(int64_t block) const {
  return allowed_.empty() ? nullptr : allowed_of(block);
}

const uint32_t* LogitBlocks::allowed_of(int64_t block) const {
  return is_cut_short(block) ? last_allowed_.data() : allowed_.data() + block * choice_words;
}

const float* LogitBlocks::logits_of(int64_t block) const {
  return is_cut_short(block) ? last_logits_.data() : logits_.data() + block * choice_block;
}

const float* LogitBlocks::plain_of(int64_t block) {
  const float* const logits = logits_of(block);
  if (allowed_.empty()) return logits;
  kernels_.forbid(logits, allowed_of(block), left_.data());
  return left_.data();
}

void LogitBlocks::open(int64_t block, const Cut& cut) {
  block_ = block;
  plain_ = nullptr;
  values_ = {};
  if (is_short())
    values_ = kept_.of(block);
  else if (is_changed(block))
    open_changed(block);
  else
    plain_ = plain_of(block);
  none_below_ = values_.tokens ? -infinity : ranges_[static_cast<size_t>(block)].least;
  const int64_t first = block * choice_block;
  least_ = first > cut.last ? std::nextafter(cut.value, infinity) : cut.value;
  if (first <= cut.last && cut.last < first + choice_block) drop_ties(cut);
}

void LogitBlocks::open_changed(int64_t block) {
  kernels_.penalize(logits_of(block), changes_->seen(block), changes_->penalties(), allowed_or_null(block),
                    wide_.data());
  const cpu::ChangedPlaces list = changes_->of(block);
  const double* const values = changed_values(block);
  for (int64_t i = 0; i < list.count; ++i) wide_[static_cast<size_t>(list.places[i])] = values[i];
  values_ = {wide_.data(), nullptr, choice_block};
}

// Those behind the last that the cut keeps become -inf.
void LogitBlocks::drop_ties(const Cut& cut) {
  none_below_ = -infinity;
  const int64_t first = block_ * choice_block;
  if (plain_) {
    for (int64_t i = 0; i < choice_block; ++i)
      left_[static_cast<size_t>(i)] = cut.keeps(plain_[i], first + i) ? plain_[i] : forbidden;
    plain_ = left_.data();
    return;
  }
  for (size_t i = 0; i < values_.count; ++i) {
    const double value = values_.values[i];
    const int64_t token = values_.tokens ? values_.tokens[i] : first + static_cast<int64_t>(i);
    left_of_list_[i] = cut.keeps(value, token) ? value : -infinity;
  }
  values_.values = left_of_list_.data();
}

// The logarithm of a sum of weights relative to that of the scale's greatest.
double LogitBlocks::log_of(double sum) const {
  const double more = rough_ ? -std::fma(scale_.greatest, scale_.factor, -scale_.origin) : 0;
  return std::log(sum) + more / log2_e;
}

double LogitBlocks::weigh() { return weigh({}, nullptr, nullptr).all; }

void LogitBlocks::weigh_each() { weigh({}, weights_.data(), nullptr); }

cpu::ChoiceSums LogitBlocks::weigh(const Bracket& bracket) {
  return weigh({std::max(bracket.least, least_), bracket.most}, nullptr, found_.data());
}

cpu::ChoiceSums LogitBlocks::weigh(const Bracket& bracket, double* weights, uint64_t* bits) {
  cpu::ChoiceScale scale = scale_;
  scale.least = std::max(scale.least, least_);
  if (none_below_ >= scale.least) scale.least = -infinity;
  if (plain_)
    return (rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits)(plain_, choice_block, scale, bracket,
                                                                            weights, bits);
  if (values_.tokens) found_ = {};
  return (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(
      values_.values, static_cast<int64_t>(values_.count), scale, bracket, weights, bits);
}

void LogitBlocks::weigh(std::span<const float> values, double* weights) const {
  (rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits)(values.data(), static_cast<int64_t>(values.size()),
                                                                   scale_, {}, weights, nullptr);
}

void LogitBlocks::weigh(std::span<const double> values, double* weights) const {
  (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(values.data(), static_cast<int64_t>(values.size()),
                                                                   scale_, {}, weights, nullptr);
}

int64_t LogitBlocks::find(const Bracket& asked) {
  const Bracket bracket = {std::max(asked.least, least_), asked.most};
  if (plain_) return kernels_.find(plain_, bracket, found_.data());
  if (values_.tokens) found_ = {};
  return kernels_.find_values(values_.values, static_cast<int64_t>(values_.count), bracket, found_.data());
}

int64_t LogitBlocks::count_found() const {
  int64_t count = 0;
  for (const uint64_t word : found_) count += count_bits(word);
  return count;
}

void LogitBlocks::list_found(ValueList& list) const {
  const int64_t first = block_ * choice_block;
  int64_t count = 0;
  if (plain_) {
    count = kernels_.list(plain_, found_.data(), first, list.values(), list.tokens());
  } else if (!values_.tokens) {
    count = kernels_.list_values(values_.values, found_.data(), first, list.values(), list.tokens());
  } else {
    for (size_t word = 0; word < found_.size(); ++word)
      for (uint64_t rest = found_[word]; rest != 0; rest &= rest - 1) {
        const size_t i = 64 * word + static_cast<size_t>(std::countr_zero(rest));
        list.values()[count] = values_.values[i];
        list.tokens()[count++] = values_.tokens[i];
      }
  }
  list.end(block_, static_cast<size_t>(count));
}

void LogitBlocks::spread() {
  spread_weights_ = weights_.data();
  if (plain_) {
    std::copy_n(plain_, choice_block, wide_.begin());
  } else if (values_.tokens) {
    std::fill(wide_.begin(), wide_.end(), -infinity);
    spread_weights_ = weights_at_.data();
    for (size_t i = 0; i < values_.count; ++i) {
      if (values_.values[i] == -infinity) continue;
      const auto place = static_cast<size_t>(values_.tokens[i] % choice_block);
      wide_[place] = values_.values[i];
      weights_at_[place] = weights_[i];
    }
  }
}

// ---- The few that are left ------------------------------------------------------------------------------------------

bool LogitBlocks::keep(const Cut& cut) {
  kept_.clear();
  for (int64_t block = 0; block < count_; ++block) {
    if (greatest(block) < cut.value) {
      kept_.end(block, 0);
      continue;
    }
    if (!kept_.has_room(choice_block)) return false;
    open(block, cut);
    find({cut.value, infinity});
    list_found(kept_);
  }
  short_ = true;
  return true;
}

}  // namespace moeflux
