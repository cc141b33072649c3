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

int64_t whole_vectors(int64_t count) { return (count + cpu::choice_lanes - 1) / cpu::choice_lanes * cpu::choice_lanes; }

// The bits that two sets have in common; the second may be null, for all.
const uint32_t* both(const uint32_t* set, const uint32_t* other, std::array<uint32_t, choice_words>& common) {
  if (!other) return set;
  for (size_t word = 0; word < common.size(); ++word) common[word] = set[word] & other[word];
  return common.data();
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
      changed_(new double[static_cast<size_t>(count_ * changed_room)]),
      kept_(max_kept + 2 * choice_block, vocab_size),
      left_(choice_block + cpu::spare_packed),
      wide_(choice_block),
      weights_(choice_block) {}

int64_t LogitBlocks::bytes() const {
  return bytes_of(last_logits_, last_allowed_, ranges_, tops_, samples_, left_, wide_, weights_) +
         count_ * changed_room * static_cast<int64_t>(sizeof(double)) + kept_.bytes();
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
  Bracket& found = ranges_[static_cast<size_t>(block)];
  changes_->fetch(block + 1);
  kernels_.penalize_nearly(logits_of(block), seen, penalties, allowed_or_null(block), left_.data());
  kernels_.change(logits_of(block), list, penalties, allowed_or_null(block), changed_values(block), left_.data());
  if (!seen || penalties.reciprocal > 0) {
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
  spread();
  const double greatest = kernels_.greatest_value(wide_.data());
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
  int64_t most = 32 * static_cast<int64_t>(allowed_.size());  // with all that are not counted yet
  for (size_t word = 0; word < allowed_.size() && count <= number && most > number; ++word) {
    const int64_t own = count_bits(allowed_[word]);
    count += own;
    most += own - 32;
  }
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
  logits_here_ = nullptr;
  values_ = {};
  if (is_short())
    values_ = kept_.of(block);
  else
    open_logits(block);
  none_below_ = values_.tokens ? -infinity : ranges_[static_cast<size_t>(block)].least;
  const int64_t first = block * choice_block;
  least_ = first > cut.last ? std::nextafter(cut.value, infinity) : cut.value;
  if (first <= cut.last && cut.last < first + choice_block) drop_ties(cut);
}

void LogitBlocks::open_logits(int64_t block) {
  logits_here_ = logits_of(block);
  as_they_are_ = allowed_or_null(block);
  penalized_ = nullptr;
  exceptions_ = {};
  if (!is_changed(block)) return;
  exceptions_ = changes_->of(block);
  as_they_are_ = both(changes_->left_alone(block), as_they_are_, bits_as_they_are_);
  if (const uint32_t* const seen = changes_->seen(block))
    penalized_ = both(seen, allowed_or_null(block), bits_penalized_);
}

// All of them, from here on.
void LogitBlocks::open_values() {
  spread();
  logits_here_ = nullptr;
  values_ = {wide_.data(), nullptr, choice_block};
}

// Of those with the cut's value, what is behind the last that stays becomes -inf.
void LogitBlocks::drop_ties(const Cut& cut) {
  none_below_ = -infinity;
  open_values();
  const int64_t last = cut.last % choice_block;
  for (int64_t place = last + 1; place < choice_block; ++place) {
    double& value = wide_[static_cast<size_t>(place)];
    value = value == cut.value ? -infinity : value;
  }
}

// The logarithm of a sum of weights relative to that of the scale's greatest.
double LogitBlocks::log_of(double sum) const {
  const double more = rough_ ? -std::fma(scale_.greatest, scale_.factor, -scale_.origin) : 0;
  return std::log(sum) + more / log2_e;
}

cpu::ChoiceSums LogitBlocks::weigh_values(const double* values, int64_t count, const cpu::ChoiceScale& scale,
                                          const Bracket& bracket, uint64_t* bits) const {
  return (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(values, count, scale, bracket, nullptr, bits);
}

cpu::ChoiceSums LogitBlocks::weigh(const Bracket& asked, bool finds) {
  const Bracket bracket = {std::max(asked.least, least_), asked.most};
  cpu::ChoiceScale scale = scale_;
  scale.least = std::max(scale.least, least_);
  uint64_t* const bits = finds ? found_.data() : nullptr;
  const auto weigh_logits = rough_ ? kernels_.weigh_logits_roughly : kernels_.weigh_logits;
  // Every value weighs something.
  cpu::ChoiceScale all = scale;
  if (rough_) all.least = -infinity;
  if (!logits_here_) {
    if (values_.tokens) found_ = {};
    return weigh_values(values_.values, static_cast<int64_t>(values_.count), scale, bracket, bits);
  }
  const bool is_whole = none_below_ >= scale.least;
  const bool is_dense = is_whole || leaves_most(scale.least);
  if (!as_they_are_ && is_dense)
    return weigh_logits(logits_here_, choice_block, is_whole ? all : scale, bracket, nullptr, bits);
  if (is_dense) {
    open_values();
    return weigh_values(values_.values, choice_block, is_whole ? all : scale, bracket, bits);
  }
  uint64_t* const others = finds ? also_found_.data() : nullptr;
  const int64_t count = kernels_.pack(logits_here_, as_they_are_, scale.least, bracket, left_.data(), bits);
  cpu::ChoiceSums sums = weigh_logits(left_.data(), count, all, bracket, nullptr, others);
  const auto add = [&](const cpu::ChoiceSums& more) { sums = {sums.all + more.all, sums.above + more.above}; };
  if (penalized_) add(weigh_penalized(all, bracket, finds));
  if (exceptions_.count > 0) {
    also_found_ = {};
    add(weigh_values(changed_values(block_), whole_vectors(exceptions_.count), scale, bracket, others));
    if (finds) add_found_exceptions();
  }
  return sums;
}

// Are most of the block's values at least this one, by its samples? Fewer are packed before they are weighed.
bool LogitBlocks::leaves_most(double least) const {
  constexpr int64_t samples = cpu::choice_samples * choice_columns;
  const float* const some = samples_.data() + block_ * samples;
  const float from = near(least);
  int count = 0;
  for (int64_t i = 0; i < samples; ++i) count += some[i] >= from;
  return count > samples * 5 / 8;
}

// Those that have the penalty.
cpu::ChoiceSums LogitBlocks::weigh_penalized(const cpu::ChoiceScale& scale, const Bracket& bracket, bool finds) {
  const double least = least_logit(std::max(scale_.least, least_), known_logits_[0]);
  const Bracket within = finds ? logits_within(bracket) : bracket;
  uint64_t* const bits = finds ? also_found_.data() : nullptr;
  const int64_t count = kernels_.pack(logits_here_, penalized_, least, within, left_.data(), bits);
  if (finds) add_found();
  kernels_.penalize_packed(left_.data(), count, changes_->penalties(), wide_.data());
  return weigh_values(wide_.data(), count, scale, bracket, bits);
}

// The logits that are in a bracket when they have the penalty.
Bracket LogitBlocks::logits_within(const Bracket& bracket) {
  const double least = least_logit(bracket.least, known_logits_[1]);
  const double above = least_logit(std::nextafter(bracket.most, infinity), known_logits_[2]);
  return {least, std::isinf(above) ? above : std::nextafter(static_cast<float>(above), forbidden)};
}

// The least f32 number whose value with the penalty is this one or more: values ascend as logits do. It is asked for
// block by block.
double LogitBlocks::least_logit(double value, KnownLogit& known) const {
  if (known.value == value) return known.logit;
  const double penalty = changes_->penalties().repetition;
  // The order of f32 numbers as that of integers.
  const auto number = [](int32_t rank) { return rank < 0 ? -std::bit_cast<float>(-rank) : std::bit_cast<float>(rank); };
  const auto is_below = [&](int32_t rank) {
    const double logit = number(rank);
    return (logit > 0 ? logit / penalty : logit * penalty) < value;
  };
  int64_t high = std::bit_cast<int32_t>(-forbidden);
  int64_t low = -high;
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (is_below(static_cast<int32_t>(middle)))
      low = middle + 1;
    else
      high = middle;
  }
  known = {value, number(static_cast<int32_t>(low))};
  return known.logit;
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
  if (!logits_here_) {
    if (values_.tokens) found_ = {};
    return kernels_.find_values(values_.values, static_cast<int64_t>(values_.count), bracket, found_.data());
  }
  int64_t above = kernels_.find(logits_here_, as_they_are_, bracket, found_.data());
  if (penalized_) {
    above += kernels_.find(logits_here_, penalized_, logits_within(bracket), also_found_.data());
    add_found();
  }
  if (exceptions_.count > 0) {
    also_found_ = {};
    above +=
        kernels_.find_values(changed_values(block_), whole_vectors(exceptions_.count), bracket, also_found_.data());
    add_found_exceptions();
  }
  return above;
}

void LogitBlocks::add_found() {
  for (size_t word = 0; word < found_.size(); ++word) found_[word] |= also_found_[word];
}

// Calls the function with the index of each exception that was found, in their order.
template <typename Function>
void LogitBlocks::each_found_exception(const Function& function) const {
  for (size_t word = 0; word < static_cast<size_t>(exceptions_.count + 63) / 64; ++word)
    for (uint64_t rest = also_found_[word]; rest != 0; rest &= rest - 1)
      function(64 * word + static_cast<size_t>(std::countr_zero(rest)));
}

void LogitBlocks::add_found_exceptions() {
  each_found_exception([&](size_t i) {
    const auto place = static_cast<size_t>(exceptions_.places[i]);
    found_[place / 64] |= uint64_t{1} << (place % 64);
  });
}

int64_t LogitBlocks::count_found() const {
  int64_t count = 0;
  for (const uint64_t word : found_) count += count_bits(word);
  return count;
}

void LogitBlocks::list_found(ValueList& list) const {
  const int64_t first = block_ * choice_block;
  double* const values = list.values();
  int32_t* const tokens = list.tokens();
  int64_t count = 0;
  if (logits_here_) {
    count = kernels_.list(logits_here_, found_.data(), first, values, tokens);
  } else if (!values_.tokens) {
    count = kernels_.list_values(values_.values, found_.data(), first, values, tokens);
  } else {
    for (size_t word = 0; word < found_.size(); ++word)
      for (uint64_t rest = found_[word]; rest != 0; rest &= rest - 1) {
        const size_t i = 64 * word + static_cast<size_t>(std::countr_zero(rest));
        values[count] = values_.values[i];
        tokens[count++] = values_.tokens[i];
      }
  }
  list.end(block_, static_cast<size_t>(count));
  if (!logits_here_) return;
  if (penalized_) kernels_.penalize_listed(values, tokens, count, penalized_, changes_->penalties());
  if (exceptions_.count > 0) list_exceptions(values, tokens, tokens + count);
}

// At their places in the list of all that were found.
void LogitBlocks::list_exceptions(double* values, const int32_t* tokens, const int32_t* end) const {
  const auto first = static_cast<int32_t>(block_ * choice_block);
  const int32_t* at = tokens;
  each_found_exception([&](size_t i) {
    at = std::lower_bound(at, end, first + exceptions_.places[i]);
    values[at - tokens] = changed_values(block_)[i];
  });
}

void LogitBlocks::spread() {
  if (logits_here_) {
    kernels_.penalize(logits_here_, changes_ ? changes_->seen(block_) : nullptr,
                      changes_ ? changes_->penalties() : cpu::Penalties{}, allowed_or_null(block_), wide_.data());
    const double* const values = changed_values(block_);
    for (int64_t i = 0; i < exceptions_.count; ++i) wide_[static_cast<size_t>(exceptions_.places[i])] = values[i];
  } else if (values_.tokens) {
    std::fill(wide_.begin(), wide_.end(), -infinity);
    for (size_t i = 0; i < values_.count; ++i)
      if (values_.values[i] > -infinity)
        wide_[static_cast<size_t>(values_.tokens[i] % choice_block)] = values_.values[i];
  }
}

void LogitBlocks::spread_weights() {
  (rough_ ? kernels_.weigh_values_roughly : kernels_.weigh_values)(wide_.data(), choice_block, scale_, {},
                                                                   weights_.data(), nullptr);
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
