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

constexpr int64_t few_blocks = 2;

constexpr double most_above = 500;  // of the range of exponents, far from its end

// Not the same of every block, for a vocabulary may have patterns.
int64_t row_of(int64_t block) { return block * 37 % cpu::choice_rows; }

// Not every machine that this is compiled for has an instruction, and the library's function takes longer.
int64_t count_bits(uint64_t word) {
  word -= word >> 1 & 0x5555555555555555;
  word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
  return static_cast<int64_t>(((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}

// The bits that two sets have in common; the second may be null, for all.
const uint32_t* both(const uint32_t* set, const uint32_t* other, std::array<uint32_t, choice_words>& common) {
  if (!other) return set;
  uint32_t* const __restrict out = common.data();  // neither of the sets
  for (size_t word = 0; word < common.size(); ++word) out[word] = set[word] & other[word];
  return out;
}

// What a near value may be off by.
double doubt(double value) {
  return std::isinf(value) ? 0 : std::abs(value) * cpu::near_choice_error + std::numeric_limits<float>::min();
}

}  // namespace

LogitBlocks::View::View(int64_t blocks)
    : ranges(static_cast<size_t>(blocks)),
      tops(ranges.size() * choice_columns),
      samples(tops.size() * choice_samples) {}

LogitBlocks::LogitBlocks(const cpu::ChoiceKernels& kernels, int64_t vocab_size)
    : kernels_(kernels),
      vocab_size_(vocab_size),
      count_(cpu::choice_blocks(vocab_size)),
      last_logits_(choice_block, forbidden),
      last_allowed_(choice_words),
      own_(count_),
      asked_(count_),
      changed_(new double[static_cast<size_t>(count_ * changed_room)]),
      kept_(max_kept + 2 * choice_block, vocab_size),
      left_(choice_block + cpu::spare_packed),
      wide_(choice_block),
      weights_(choice_block) {}

int64_t LogitBlocks::bytes() const {
  return bytes_of(last_logits_, last_allowed_, own_.ranges, own_.tops, own_.samples, asked_.ranges, asked_.tops,
                  asked_.samples, left_, wide_, weights_) +
         count_ * changed_room * static_cast<int64_t>(sizeof(double)) + kept_.bytes();
}

// ---- All of them ----------------------------------------------------------------------------------------------------

void LogitBlocks::begin(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed) {
  logits_ = logits;
  asked_.changes = changes;
  asked_.allowed = allowed;
  own_.greatest = asked_.greatest = forbidden;
  const int64_t last = (count_ - 1) * choice_block;
  std::copy(logits.begin() + last, logits.end(), last_logits_.begin());
  if (!allowed.empty()) std::copy(allowed.begin() + last / 32, allowed.end(), last_allowed_.begin());
  short_ = false;
}

void LogitBlocks::take(std::span<const float> logits, const Changes* changes, std::span<const uint32_t> allowed) {
  begin(logits, changes, allowed);
  show_asked();
  for (int64_t block = 0; block < count_; ++block) {
    next_ = next_of(block);
    look_at(block);
  }
  if (changes) find_greatest();
}

void LogitBlocks::take_listed(const ListedValues& list) {
  asked_.changes = nullptr;
  asked_.allowed = {};
  show_asked();
  kept_.clear();
  std::copy_n(list.values, list.count, kept_.values());
  std::copy_n(list.tokens, list.count, kept_.tokens());
  kept_.end(0, list.count);
  asked_.greatest = *std::max_element(list.values, list.values + list.count);
  asked_.ranges.front() = {-infinity, asked_.greatest};
  short_ = true;
}

// Weights may be of any number instead of the greatest, so long as none is too great for its exponent.
double LogitBlocks::take_with_sum(std::span<const float> logits, const Changes* changes,
                                  std::span<const uint32_t> allowed) {
  begin(logits, changes, allowed);
  const bool is_changed = changes || !allowed.empty();
  double sum = 0;
  for (int64_t block = 0; block < count_; ++block) {
    view_ = is_changed ? &asked_ : &own_;
    next_ = logits_of(block);  // which is near: there is time for the next while this one is weighed
    const bool is_first = own_.greatest == -infinity;
    look_at(block, is_changed ? &own_ : nullptr);
    if (are_few() || own_.greatest == -infinity) continue;
    view_ = &own_;
    if (is_first) set_scale(choice_scale(own_.greatest, log2_e), true);
    sum += weigh_own(block);
  }
  show_asked();
  if (changes) find_greatest();
  view_ = &own_;
  const double above = own_.greatest - scale_.greatest;
  return are_few() || above > most_above ? std::numeric_limits<double>::quiet_NaN() : log_of(sum) - above;
}

// As it was asked for; and, into the other view, as it is.
void LogitBlocks::look_at(int64_t block, View* own) {
  if (is_changed(block)) return look_at_changed(block, own);
  const cpu::ChoiceRange range = range_of(block, {logits_of(block), allowed_or_null(block)}, own);
  if (std::isnan(range.greatest)) refuse(block);
  view_->ranges[static_cast<size_t>(block)] = {view_->allowed.empty() ? range.least : -infinity, range.greatest};
  view_->greatest = std::max<double>(view_->greatest, range.greatest);
}

// At near values: the exact ones take longer. Where those are beyond f32 numbers, or the penalty is, at the exact ones.
void LogitBlocks::look_at_changed(int64_t block, View* own) {
  constexpr float most = std::numeric_limits<float>::max();
  Bracket& found = view_->ranges[static_cast<size_t>(block)];
  view_->changes->fetch(block + 1);
  open_logits(block);
  const cpu::ChoiceRange plain = range_of(block, here_, own);
  const cpu::ChoiceRange listed =
      kernels_.change(here_.logits, exceptions_, penalties(), allowed_or_null(block), changed_values(block),
                      row_of(block), tops_of(block), samples_of(block));
  if (!here_.penalized || penalties().reciprocal > 0) {
    const float least = std::min(plain.least, listed.least);
    const float greatest = std::max(plain.greatest, listed.greatest);
    found.least = view_->allowed.empty() && least > -most ? least - doubt(least) : -infinity;
    found.most = greatest + doubt(greatest);
    if (plain.greatest < most && listed.greatest < most) return;
  }
  found = {-infinity, greatest_value(block)};
  std::transform(wide_.begin(), wide_.end(), left_.begin(), nearest_float);
  range_of(block, {left_.data()});
}

cpu::ChoiceRange LogitBlocks::range_of(int64_t block, const cpu::MarkedLogits& marked, View* own) {
  float* const tops = tops_of(block);
  float* const samples = samples_of(block);
  const auto look = [&](cpu::ChoiceProbes* probes) {
    return kernels_.range(marked, penalties(), next_, row_of(block), tops, samples, probes);
  };
  if (!own) return look(nullptr);
  cpu::ChoiceProbes probes = {{}, own->tops_of(block), own->samples_of(block)};
  const cpu::ChoiceRange range = look(marked.plain ? &probes : nullptr);
  if (!marked.plain) {  // all are values as they are
    probes.range = range;
    std::copy_n(tops, choice_columns, probes.tops);
    std::copy_n(samples, choice_samples * choice_columns, probes.samples);
  }
  if (std::isnan(probes.range.greatest)) {
    view_ = own;
    refuse(block);
  }
  own->ranges[static_cast<size_t>(block)] = {probes.range.least, probes.range.greatest};
  own->greatest = std::max<double>(own->greatest, probes.range.greatest);
  return range;
}

const cpu::Penalties& LogitBlocks::penalties() const {
  static constexpr cpu::Penalties none;
  return view_->changes ? view_->changes->penalties() : none;
}

// Of those that may have it, in which values were changed.
void LogitBlocks::find_greatest() {
  for (;;) {
    const auto found = std::max_element(view_->ranges.begin(), view_->ranges.end(),
                                        [](const Bracket& a, const Bracket& b) { return a.most < b.most; });
    if (found->most <= view_->greatest) return;
    found->most = greatest_value(found - view_->ranges.begin());
    view_->greatest = std::max(view_->greatest, found->most);
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
  if (view_->allowed.empty()) return vocab_size_ > number;
  const std::span<const uint32_t> words = view_->allowed;
  int64_t count = 0;
  int64_t most = 32 * static_cast<int64_t>(words.size());  // with all that are not counted yet
  for (size_t word = 0; word < words.size() && count <= number && most > number; word += 2) {
    const bool is_last = word + 1 == words.size();
    const int64_t own = count_bits(words[word] | static_cast<uint64_t>(is_last ? 0 : words[word + 1]) << 32);
    count += own;
    most += own - (is_last ? 32 : 64);
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
    if (greatest(block) < view_->greatest) continue;
    open(block);
    spread();
    const auto found = std::find(wide_.begin(), wide_.end(), view_->greatest);
    if (found != wide_.end()) return static_cast<int32_t>(block * choice_block + (found - wide_.begin()));
  }
}

// ---- A block --------------------------------------------------------------------------------------------------------

const uint32_t* LogitBlocks::allowed_or_null(int64_t block) const {
  return view_->allowed.empty() ? nullptr : allowed_of(block);
}

const uint32_t* LogitBlocks::allowed_of(int64_t block) const {
  return is_cut_short(block) ? last_allowed_.data() : view_->allowed.data() + block * choice_words;
}

const float* LogitBlocks::next_of(int64_t block) const { return logits_of(std::min(block + 1, count_ - 1)); }

const float* LogitBlocks::logits_of(int64_t block) const {
  return is_cut_short(block) ? last_logits_.data() : logits_.data() + block * choice_block;
}

void LogitBlocks::open(int64_t block, const Cut& cut) {
  block_ = block;
  here_ = {};
  values_ = {};
  if (is_short())
    values_ = kept_.of(block);
  else
    open_logits(block);
  none_below_ = values_.tokens ? -infinity : view_->ranges[static_cast<size_t>(block)].least;
  const int64_t first = block * choice_block;
  least_ = first > cut.last ? std::nextafter(cut.value, infinity) : cut.value;
  if (first <= cut.last && cut.last < first + choice_block) drop_ties(cut);
}

void LogitBlocks::open_logits(int64_t block) {
  here_ = {logits_of(block), allowed_or_null(block)};
  exceptions_ = {};
  if (!is_changed(block)) return;
  exceptions_ = view_->changes->of(block);
  here_.plain = both(view_->changes->left_alone(block), allowed_or_null(block), bits_as_they_are_);
  if (const uint32_t* const seen = view_->changes->seen(block))
    here_.penalized = both(seen, allowed_or_null(block), bits_penalized_);
}

// All of them, from here on.
void LogitBlocks::open_values() {
  spread();
  here_.logits = nullptr;
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

int64_t LogitBlocks::find(const Bracket& asked) {
  const Bracket bracket = {std::max(asked.least, least_), asked.most};
  if (!here_.logits) {
    if (values_.tokens) found_ = {};
    return kernels_.find_values(values_.values, static_cast<int64_t>(values_.count), bracket, found_.data());
  }
  int64_t above = kernels_.find(here_, bounds_of(bracket.least, bracket), found_.data());
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

void LogitBlocks::list_found(ValueList& list) {
  finish_list();
  const int64_t first = block_ * choice_block;
  double* const values = list.values();
  int32_t* const tokens = list.tokens();
  int64_t count = 0;
  if (here_.logits) {
    count = kernels_.list(here_.logits, found_.data(), first, values, tokens);
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
  if (!here_.logits) return;
  if (here_.penalized) pending_ = {values, tokens, count, view_->changes->seen(block_)};
  if (exceptions_.count > 0) list_exceptions(values);
}

// Vectors of what was just written number by number would wait until that is in the cache: a block later it is.
void LogitBlocks::finish_list() {
  if (pending_.count > 0)
    kernels_.penalize_listed(pending_.values, pending_.tokens, pending_.count, pending_.seen, penalties());
  pending_ = {};
}

// At their places in the list of all that were found.
void LogitBlocks::list_exceptions(double* values) const {
  size_t word = 0;
  int64_t before = 0;  // so many were found in the words before
  each_found_exception([&](size_t i) {
    const auto place = static_cast<size_t>(exceptions_.places[i]);
    for (; word < place / 64; ++word) before += count_bits(found_[word]);
    values[before + count_bits(found_[word] & ((uint64_t{1} << place % 64) - 1))] = changed_values(block_)[i];
  });
}

void LogitBlocks::spread() {
  if (here_.logits) {
    kernels_.penalize(here_.logits, view_->changes ? view_->changes->seen(block_) : nullptr, penalties(),
                      allowed_or_null(block_), wide_.data());
    const double* const values = changed_values(block_);
    for (int64_t i = 0; i < exceptions_.count; ++i) wide_[static_cast<size_t>(exceptions_.places[i])] = values[i];
  } else if (values_.tokens) {
    std::fill(wide_.begin(), wide_.end(), -infinity);
    for (size_t i = 0; i < values_.count; ++i)
      if (values_.values[i] > -infinity)
        wide_[static_cast<size_t>(values_.tokens[i] % choice_block)] = values_.values[i];
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
    if (!kept_.has_room(choice_block)) {
      finish_list();
      return false;
    }
    open(block, cut);
    find({cut.value, infinity});
    list_found(kept_);
  }
  finish_list();
  short_ = true;
  return true;
}

}  // namespace moeflux
