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

// The f32 next to a number, at or above it.
float round_up(double number) {
  constexpr float most = std::numeric_limits<float>::max();
  if (std::isinf(number)) return static_cast<float>(number);
  if (number < -most) return -most;
  if (number > most) return std::numeric_limits<float>::infinity();
  const auto rounded = static_cast<float>(number);
  return rounded < number ? std::nextafter(rounded, std::numeric_limits<float>::infinity()) : rounded;
}

float round_down(double number) { return -round_up(-number); }

// The same of a number that is not NaN, without a branch that nobody could foretell.
float floor_of(double number) {
  const auto rounded = static_cast<float>(number);
  const auto bits = std::bit_cast<int32_t>(rounded);
  return std::bit_cast<float>(bits - (rounded > number) * (bits >= 0 ? 1 : -1));
}

}  // namespace

LogitBlocks::LogitBlocks(const cpu::ChoiceKernels& kernels, int64_t vocab_size)
    : kernels_(kernels),
      vocab_size_(vocab_size),
      count_(cpu::choice_blocks(vocab_size)),
      last_logits_(choice_block, forbidden),
      last_allowed_(choice_words),
      greatest_of_(static_cast<size_t>(count_)),
      tops_(greatest_of_.size() * choice_columns),
      samples_(tops_.size() * choice_samples),
      changed_(new double[static_cast<size_t>(count_ * choice_block)]),
      kept_(max_kept, vocab_size),
      left_(choice_block),
      wide_(choice_block),
      left_of_list_(choice_block),
      weights_(choice_block),
      weights_at_(choice_block) {}

int64_t LogitBlocks::bytes() const {
  return bytes_of(last_logits_, last_allowed_, greatest_of_, tops_, samples_, left_, wide_, left_of_list_, weights_,
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

void LogitBlocks::take(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed,
                       bool probes) {
  begin(logits, changes, allowed);
  for (int64_t block = 0; block < count_; ++block) look_at(block, probes);
}

// Weights may be of any number instead of the greatest, so long as none is too great for its exponent.
double LogitBlocks::take_with_sum(std::span<const float> logits) {
  begin(logits, nullptr, {});
  double sum = 0;
  for (int64_t block = 0; block < count_; ++block) {
    const bool is_first = greatest_ == -infinity;
    look_at(block, true);
    if (are_few() || greatest_ == -infinity) continue;
    if (is_first) set_scale(choice_scale(greatest_, log2_e), true);
    plain_ = logits_of(block);
    least_ = -infinity;
    sum += weigh();
  }
  const double above = greatest_ - scale_.greatest;
  return are_few() || above > most_above ? std::numeric_limits<double>::quiet_NaN() : std::log(sum) - above;
}

void LogitBlocks::look_at(int64_t block, bool probes) {
  const float* const plain = plain_of(block);
  double changed_most = -infinity;
  if (const cpu::ChangedPlaces list = changed(block); list.count > 0) {
    changed_most = kernels_.change(logits_of(block), list, changes_->penalties(),
                                   allowed_.empty() ? nullptr : allowed_of(block), changed_values(block));
    if (probes) probe_changed(block);
  }
  const float most = kernels_.greatest(plain, logits_of(std::min(block + 1, count_ - 1)), row_of(block),
                                       tops_.data() + block * choice_columns,
                                       samples_.data() + block * choice_samples * choice_columns);
  if (std::isnan(changed_most) || std::isnan(most)) refuse(block);
  greatest_of_[static_cast<size_t>(block)] = std::max<double>(changed_most, most);
  greatest_ = std::max(greatest_, greatest(block));
}

// Puts values that were changed among the logits to be looked at, for tops and samples. None becomes greater by that,
// so the greatest of all stays what it is.
void LogitBlocks::probe_changed(int64_t block) {
  const cpu::ChangedPlaces list = changed(block);
  const double* const values = changed_values(block);
  for (int64_t i = 0; i < list.count; ++i) left_[static_cast<size_t>(list.places[i])] = floor_of(values[i]);
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
  for (size_t word = 0; word < allowed_.size() && count <= number; ++word) count += std::popcount(allowed_[word]);
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
  int64_t block = 0;
  while (greatest(block) != greatest_) ++block;
  open(block);
  spread();
  const auto found = std::find(wide_.begin(), wide_.end(), greatest_);
  return static_cast<int32_t>(block * choice_block + (found - wide_.begin()));
}

// ---- A block --------------------------------------------------------------------------------------------------------

const uint32_t* LogitBlocks::allowed_of(int64_t block) const {
  return is_cut_short(block) ? last_allowed_.data() : allowed_.data() + block * choice_words;
}

// The bits of those that are looked at as plain logits; null: all.
const uint32_t* LogitBlocks::plain_bits_of(int64_t block) {
  const bool any_changed = changed(block).count > 0;
  if (allowed_.empty()) return any_changed ? changes_->unchanged(block) : nullptr;
  const uint32_t* const allowed = allowed_of(block);
  if (!any_changed) return allowed;
  const uint32_t* const unchanged = changes_->unchanged(block);
  std::transform(allowed, allowed + choice_words, unchanged, plain_bits_.begin(), std::bit_and());
  return plain_bits_.data();
}

const float* LogitBlocks::logits_of(int64_t block) const {
  return is_cut_short(block) ? last_logits_.data() : logits_.data() + block * choice_block;
}

const float* LogitBlocks::plain_of(int64_t block) {
  const float* const logits = logits_of(block);
  const uint32_t* const bits = plain_bits_of(block);
  if (!bits) return logits;
  kernels_.forbid(logits, bits, left_.data());
  return left_.data();
}

void LogitBlocks::open(int64_t block, const Cut& cut) {
  block_ = block;
  plain_ = nullptr;
  values_ = {};
  if (is_short())
    values_ = kept_.of(block);
  else if (changed(block).count > 0)
    open_changed(block);
  else
    plain_ = plain_of(block);
  const int64_t first = block * choice_block;
  least_ = first > cut.last ? std::nextafter(cut.value, infinity) : cut.value;
  if (first <= cut.last && cut.last < first + choice_block) drop_ties(cut);
}

void LogitBlocks::open_changed(int64_t block) {
  kernels_.widen(logits_of(block), plain_bits_of(block), wide_.data());
  const cpu::ChangedPlaces list = changed(block);
  const double* const values = changed_values(block);
  for (int64_t i = 0; i < list.count; ++i) wide_[static_cast<size_t>(list.places[i])] = values[i];
  values_ = {wide_.data(), nullptr, choice_block};
}

// Those behind the last that the cut keeps become -inf.
void LogitBlocks::drop_ties(const Cut& cut) {
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

double LogitBlocks::weigh() { return weigh({}, nullptr, nullptr).all; }

void LogitBlocks::weigh_each() { weigh({}, weights_.data(), nullptr); }

cpu::ChoiceSums LogitBlocks::weigh(const Bracket& bracket) {
  return weigh({std::max(bracket.least, least_), bracket.most}, nullptr, found_.data());
}

cpu::ChoiceSums LogitBlocks::weigh(const Bracket& bracket, double* weights, uint64_t* bits) {
  cpu::ChoiceScale scale = scale_;
  scale.least = std::max(scale.least, least_);
  if (plain_)
    return (rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits)(plain_, choice_block, scale, bracket,
                                                                            weights, bits);
  if (values_.tokens) found_ = {};
  return (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(
      values_.values, static_cast<int64_t>(values_.count), scale, bracket, weights, bits);
}

void LogitBlocks::weigh(std::span<const float> values, double* weights) const {
  kernels_.weigh_logits_roughly(values.data(), static_cast<int64_t>(values.size()), scale_, {}, weights, nullptr);
}

void LogitBlocks::weigh(std::span<const double> values, double* weights) const {
  (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(values.data(), static_cast<int64_t>(values.size()),
                                                                   scale_, {}, weights, nullptr);
}

int64_t LogitBlocks::find(const Bracket& asked) {
  const Bracket bracket = {std::max(asked.least, least_), asked.most};
  if (plain_) return kernels_.find(plain_, round_up(bracket.least), round_down(bracket.most), found_.data());
  if (values_.tokens) found_ = {};
  return kernels_.find_values(values_.values, static_cast<int64_t>(values_.count), bracket, found_.data());
}

int64_t LogitBlocks::count_found() const {
  int64_t count = 0;
  for (const uint64_t word : found_) count += std::popcount(word);
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

void LogitBlocks::keep(const Cut& cut) {
  kept_.clear();
  for (int64_t block = 0; block < count_; ++block) {
    if (greatest(block) < cut.value) {
      kept_.end(block, 0);
      continue;
    }
    open(block, cut);
    find({cut.value, infinity});
    list_found(kept_);
  }
  short_ = true;
}

}  // namespace moeflux
