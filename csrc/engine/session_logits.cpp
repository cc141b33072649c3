// The logits of a session: where they are, and what is asked of them.
#include <algorithm>

#include "core/error.h"
#include "core/shortlist.h"
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
  if (!was_asked_) wanted_ = {};
  return read_row(logits_row_);
}

// Brings it to the host, if it is not there.
std::span<const float> EngineSession::read_row(int64_t row) const {
  const std::span<const float> all = read_part(row, 0, engine_->variant().vocab_size);
  row_here_ = row;
  return all;
}

// The same of a part.
std::span<const float> EngineSession::read_part(int64_t row, int64_t first, int64_t end) const {
  const Mirrored part = logits_of(row).at(first);
  if (surveyed_.any && row_here_ != row) engine_->download(part, (end - first) * 4);
  return {part.values<float>(), static_cast<size_t>(end - first)};
}

void EngineSession::read_logits(const LogitsReader& read) const {
  const Use use(*this);
  check_logits();
  if (!was_asked_) wanted_ = {};
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
  want({true, was_asked_ ? wanted_.factor : 0});
  if (!surveyed_.any || vocab_size != engine_->variant().vocab_size) return std::nullopt;
  return head_of(logits_row_).likeliest;
}

bool EngineSession::read_shortlist(int64_t vocab_size, double factor, const ShortlistReader& read) const {
  const Use use(*this);
  check_logits();
  want({true, factor});
  if (surveyed_.factor != factor || vocab_size != engine_->variant().vocab_size) return false;
  const ShortlistLayout layout(vocab_size);
  const auto* const at = list_of(logits_row_).values<std::byte>();
  const auto count = static_cast<size_t>(head_of(logits_row_).count);
  const std::function<std::span<const float>(int64_t)> read_block = [&](int64_t block) {
    return read_part(logits_row_, block * shortlist_block, std::min(vocab_size, (block + 1) * shortlist_block));
  };
  const Shortlist list = {factor,
                          vocab_size,
                          {reinterpret_cast<const ShortlistBlock*>(at), static_cast<size_t>(layout.blocks)},
                          {reinterpret_cast<const int32_t*>(at + layout.tokens_at()), count},
                          {reinterpret_cast<const float*>(at + layout.logits_at()), count},
                          read_block};
  if (read(list)) return true;
  // What was not enough is likely not to be again.
  wanted_ = {};
  was_asked_ = false;
  return false;
}

void EngineSession::want(const Surveyed& wanted) const {
  wanted_ = wanted;
  was_asked_ = true;
}

const ShortlistHead& EngineSession::head_of(int64_t row) const {
  return found_->begin().values<const ShortlistHead>()[row];
}

// Behind all heads.
Mirrored EngineSession::list_of(int64_t row) const {
  const auto heads = static_cast<int64_t>(sizeof(ShortlistHead)) * (1 + engine_->drafts());
  return found_->begin().at(heads, 1).at(row, ShortlistLayout(engine_->variant().vocab_size).bytes());
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
