// The logits of a session: where they are, and what is asked of them.
#include "core/error.h"
#include "engine/hidden_rows.h"
#include "engine/session.h"

namespace moeflux {

void EngineSession::check_logits() const {
  if (const Variant& variant = engine_->variant(); !variant.ends())
    throw StateError(concat("session: expected an engine with the last layer, which has the logits, found one with ",
                            variant.layers_named()));
  if (!has_logits_)
    throw StateError("session: expected a token evaluated since it was made, cleared, rewound or restored, found none");
}

std::span<const float> EngineSession::logits() const {
  const Use use(*this);
  check_logits();
  wants_survey_ = asked_survey_;
  return read_row(logits_row_);
}

// Brings it to the host, if it is not there.
std::span<const float> EngineSession::read_row(int64_t row) const {
  const int64_t vocab = engine_->variant().vocab_size;
  if (is_surveyed_ && row_here_ != row) {
    engine_->download(logits_of(row), vocab * 4);
    row_here_ = row;
  }
  return {logits_of(row).values<float>(), static_cast<size_t>(vocab)};
}

void EngineSession::read_logits(const LogitsReader& read) const {
  const Use use(*this);
  check_logits();
  wants_survey_ = asked_survey_;
  read(read_row(logits_row_));
}

int32_t EngineSession::argmax() const {
  if (const std::optional<int32_t> found = likeliest(engine_->variant().vocab_size)) return *found;
  int32_t id;
  float value;
  top_k({&id, 1}, {&value, 1});
  return id;
}

std::optional<int32_t> EngineSession::likeliest(int64_t vocab_size) const {
  const Use use(*this);
  check_logits();
  wants_survey_ = asked_survey_ = true;
  if (!is_surveyed_ || vocab_size != engine_->variant().vocab_size) return std::nullopt;
  return found_->begin().values<int32_t>()[logits_row_ * 2];
}

void EngineSession::top_k(std::span<int32_t> ids, std::span<float> values) const {
  const Use use(*this);
  const int64_t vocab = engine_->variant().vocab_size;
  const auto k = static_cast<int64_t>(ids.size());
  if (k < 1 || k > std::min(vocab, max_top_k))
    throw ArgumentError(concat("k: expected 1 to ", std::min(vocab, max_top_k), ", found ", k));
  if (values.size() != ids.size()) throw ArgumentError("top_k: expected as many values as ids");
  check_logits();
  engine_->top_k(logits_of(logits_row_).device, ids, values);
}

// Damaged weights show here, before anybody samples from them.
void EngineSession::check_finite(const char* what, std::span<const float> numbers, size_t width) {
  const std::optional<size_t> odd = first_not_finite(numbers);
  if (!odd) return;
  break_off(engine_->variant().ends() ? "its logits were not finite" : "its hidden rows were not finite");
  throw Error(concat(what, "[", *odd % width, "]: expected a finite number, found ", numbers[*odd],
                     ": the weights are damaged (`moeflux verify` tells where) or the state that was restored is"));
}

}  // namespace moeflux
