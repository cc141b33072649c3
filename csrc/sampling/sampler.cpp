#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "core/error.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernels.h"
#include "sampling/changes.h"
#include "sampling/chooser.h"
#include "sampling/short_chooser.h"

namespace moeflux {

namespace {

void check_number(const char* name, double value, double least, double most) {
  if (value >= least && value <= most && std::isfinite(value)) return;
  const std::string range = most < infinity ? concat(least, " to ", most) : concat("at least ", least);
  throw ArgumentError(concat(name, ": expected ", range, ", found ", value));
}

void check_above_0(const char* name, double value, double most) {
  check_number(name, value, 0, most);
  if (value == 0) throw ArgumentError(concat(name, ": expected more than 0, found 0"));
}

void check_token(const char* name, int32_t token, int64_t vocab_size) {
  if (token < 0 || token >= vocab_size)
    throw ArgumentError(concat(name, ": expected tokens 0 to ", vocab_size - 1, ", found ", token));
}

const Sampling& checked(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  if (vocab_size < 1 || vocab_size > most)
    throw ArgumentError(concat("vocabulary: expected 1 to ", most, " tokens, found ", vocab_size));
  check_number("temperature", sampling.temperature, 0, infinity);
  check_number("top_k", static_cast<double>(sampling.top_k), 0, infinity);
  check_above_0("top_p", sampling.top_p, 1);
  check_number("min_p", sampling.min_p, 0, 1);
  check_above_0("repetition_penalty", sampling.repetition_penalty, infinity);
  check_number("presence_penalty", sampling.presence_penalty, -infinity, infinity);
  check_number("frequency_penalty", sampling.frequency_penalty, -infinity, infinity);
  for (const auto& [token, bias] : sampling.logit_bias) {
    check_token("logit_bias", token, vocab_size);
    if (bias != -infinity) check_number("logit_bias", bias, -infinity, infinity);
  }
  for (const int32_t token : prompt) check_token("prompt", token, vocab_size);
  return sampling;
}

}  // namespace

Sampler::Sampler(const Sampling& sampling, int64_t vocab_size, std::span<const int32_t> prompt, const std::string& isa)
    : sampling_(checked(sampling, vocab_size, prompt)),
      vocab_size_(vocab_size),
      changes_(std::make_unique<Changes>(sampling, vocab_size, prompt)),
      chooser_(std::make_unique<Chooser>(cpu::choose_isa(isa).kernels->choice, vocab_size)),
      short_chooser_(std::make_unique<ShortChooser>(cpu::choose_isa(isa).kernels->choice)),
      random_(sampling.seed) {}

Sampler::~Sampler() = default;

// Holds the sampler for one call.
class Sampler::Use {
 public:
  explicit Use(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire))
      throw StateError("sampler: expected one caller at a time, found a call under way in another thread");
  }
  ~Use() { busy_.store(false, std::memory_order_release); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  std::atomic<bool>& busy_;
};

int32_t Sampler::choose(std::span<const float> logits, std::span<const uint32_t> allowed,
                        LogProbabilities* log_probabilities) {
  const Use use(busy_);
  check(logits, allowed, log_probabilities);
  const Changes* const changes = changes_->none() ? nullptr : changes_.get();
  const bool as_they_are = !changes && allowed.empty();
  // A draw at temperature 1 makes the sum anyway.
  const bool sums = log_probabilities && !(as_they_are && sampling_.temperature == 1);
  if (sums)
    chooser_->take_with_sum(logits, changes, allowed);
  else
    chooser_->take(logits, changes, allowed);
  check_left();
  double all = 0;  // the logarithm of the sum of their exponentials
  if (log_probabilities) find_likeliest(*log_probabilities);
  if (sums && !as_they_are) {
    all = chooser_->greatest() + chooser_->log_sum();
    chooser_->show_asked();
    check_left();
  }
  const int32_t token =
      sampling_.temperature == 0 ? chooser_->likeliest() : chooser_->draw(sampling_, random_.uniform());
  if (log_probabilities) {
    if (as_they_are) all = chooser_->greatest() + chooser_->log_sum();
    for (LogProbability& each : log_probabilities->best) each.value -= all;
    log_probabilities->of_token = logits[static_cast<size_t>(token)] - all;
  }
  changes_->count(token);
  return token;
}

double Sampler::shortlist_factor() const {
  return ShortChooser::takes(sampling_, *changes_, vocab_size_) ? choice_factor(sampling_.temperature) : 0;
}

std::optional<int32_t> Sampler::choose(const Shortlist& list) {
  const Use use(busy_);
  Philox random = random_;
  const std::optional<int32_t> token = short_chooser_->draw(list, sampling_, *changes_, random.uniform());
  if (!token) return std::nullopt;
  random_ = random;
  ++from_shortlists_;
  changes_->count(*token);
  return token;
}

bool Sampler::is_greedy() const { return sampling_.temperature == 0 && changes_->none(); }

int64_t Sampler::bytes() const { return changes_->bytes() + chooser_->bytes() + short_chooser_->bytes(); }

int64_t Sampler::max_bytes(int64_t vocab_size) {
  Sampling everything;
  everything.repetition_penalty = 2;
  everything.presence_penalty = 1;
  return Sampler(everything, vocab_size, {}).bytes();
}

void Sampler::check(std::span<const float> logits, std::span<const uint32_t> allowed,
                    const LogProbabilities* log_probabilities) const {
  if (static_cast<int64_t>(logits.size()) != vocab_size_)
    throw ArgumentError(concat("logits: expected ", vocab_size_, ", found ", logits.size()));
  const auto words = static_cast<size_t>((vocab_size_ + 31) / 32);
  if (!allowed.empty() && allowed.size() != words)
    throw ArgumentError(concat("allowed: expected ", words, " words of 32 bits, found ", allowed.size()));
  const int64_t most = std::min(max_log_probabilities, vocab_size_);
  if (log_probabilities && static_cast<int64_t>(log_probabilities->best.size()) > most)
    throw ArgumentError(concat("log_probabilities: expected at most ", most, " of the likeliest, found ",
                               log_probabilities->best.size()));
}

void Sampler::check_left() const {
  if (chooser_->greatest() == -infinity)
    throw ArgumentError("choosing: expected to leave at least one token, found all of them forbidden");
}

// Their logits.
void Sampler::find_likeliest(LogProbabilities& wanted) {
  if (wanted.best.empty()) return;
  const auto [found, cut] = chooser_->best(static_cast<int64_t>(wanted.best.size()));
  size_t count = 0;
  for (size_t i = 0; i < found.count; ++i)
    if (found.values[i] > -infinity && cut.keeps(found.values[i], found.tokens[i]))
      wanted.best[count++] = {found.tokens[i], found.values[i]};
  wanted.best.resize(count);
  std::sort(wanted.best.begin(), wanted.best.end(), [](const auto& a, const auto& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
  });
}

}  // namespace moeflux
