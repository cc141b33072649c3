#include "decoder/running.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "decoder/choosing.h"

namespace moeflux {

Decoder::Running::Running(int64_t number, Request asked)
    : id(number),
      request(std::move(asked)),
      position(request.session->position()),
      serial(request.session->logits_serial()) {}

std::span<const int32_t> Decoder::Running::tokens(int64_t rows) const {
  if (next) return {&*next, 1};
  auto count = std::min<int64_t>(rows, static_cast<int64_t>(request.tokens.size() - read));
  for (const int64_t border : request.borders)
    if (border > position) count = std::min(count, border - position);
  return std::span(request.tokens).subspan(read, static_cast<size_t>(count));
}

void Decoder::Running::evaluated(const Work& work) {
  position += static_cast<int64_t>(work.tokens.size());
  serial = work.serial;
  if (!events.empty()) events.back().error.clear();  // of a step before
  if (next) {
    next.reset();
    return;
  }
  read += work.tokens.size();
  tell().evaluated += static_cast<int64_t>(work.tokens.size());
  if (!std::ranges::binary_search(request.borders, position)) return;
  try {
    request.session->checkpoint();
  } catch (const Error& error) {
    fail(error.what());
  }
}

void Decoder::Running::choose() {
  const bool wants_more = request.log_probabilities.has_value();
  LogProbabilities found;
  StepStats stats;
  if (wants_more) found.best.resize(static_cast<size_t>(*request.log_probabilities));
  try {
    check_session();
    const std::span<const uint32_t> allowed = mask ? std::span<const uint32_t>(*mask) : std::span<const uint32_t>();
    next = choose_token(*request.sampler, *request.session, allowed, wants_more ? &found : nullptr);
    stats = request.session->last();
  } catch (const Error& error) {
    fail(error.what());
    return;
  }
  mask.reset();
  ++chosen;
  DecoderEvent& told = has_told_token() ? tell_more() : tell();
  told.token = next;
  told.stats = stats;
  if (wants_more) {
    told.log_probability = found.of_token;
    told.likeliest = std::move(found.best);
  }
  if (std::ranges::find(request.stop_tokens, *next) != request.stop_tokens.end())
    told.finish = "end";
  else if (chosen == request.max_tokens)
    told.finish = "length";
  else if (position == request.session->max_context())
    told.finish = "context";
  over = !told.finish.empty();
}

void Decoder::Running::fail(const std::string& error) {
  DecoderEvent& told = tell();
  told.finish = "failed";
  told.error = error;
  over = true;
}

DecoderEvent& Decoder::Running::tell() { return events.empty() ? tell_more() : events.back(); }

DecoderEvent& Decoder::Running::tell_more() {
  events.emplace_back().id = id;
  return events.back();
}

// A session that somebody else uses is met by the next step.
bool Decoder::Running::is_foreseen() const {
  if (over || !next || request.masked || request.stepwise) return false;
  try {
    return request.session->foresees(*next);
  } catch (const Error&) {
    return false;
  }
}

void Decoder::Running::check_session() const {
  if (request.session->position() != position || request.session->logits_serial() != serial)
    throw StateError(
        concat("request ", id, ": expected its session as the last step left it, found it used otherwise"));
}

}  // namespace moeflux
