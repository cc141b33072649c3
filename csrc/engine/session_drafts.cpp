// The part of a session that knows of drafts: what a call evaluates besides its tokens, and what a call before has
// evaluated already.
#include <algorithm>

#include "engine/session.h"

namespace moeflux {

namespace {

// Whoever asks for it may know of drafts.
bool is_step(const Work& work) { return work.tokens.size() == 1 && work.logits && work.all_logits.empty(); }

}  // namespace

bool EngineSession::foresees(int32_t token) const {
  enter();
  const bool found = drafts_.next_is(token);
  leave();
  return found;
}

// The state becomes that of the session's position, without anything ahead of it.
void EngineSession::settle() noexcept {
  if (std::unique_ptr<Buffer>* const copy = drafts_.forget()) state_.swap_recurrent(*copy);
}

bool EngineSession::begin_foreseen(const Work& work) {
  call_ = {};
  call_.foreseen = is_step(work) && drafts_.next_is(work.tokens.front());
  if (call_.foreseen) return true;
  if (is_step(work) && drafts_.kept() > 0)
    engine_->draft_governor().add_outcome(drafts_.longest(), drafts_.kept(), drafts_.row());
  settle();
  return false;
}

int64_t EngineSession::draft(const Work& work, int64_t most) {
  if (!is_step(work) || known_tokens_ != position()) return 0;
  most = std::min(most, engine_->draft_governor().drafts(drafts_.longest()));
  const auto known = static_cast<size_t>(known_tokens_);
  const std::span<const int32_t> before = {View{token_room_.get()}.host<int32_t>(), known};
  most = std::min(most, options_.max_context - position() - 1);
  if (most <= 0) return 0;
  if (draft_memory_ && !draft_memory_->can_draft(position())) return 0;
  if (draft_memory_ && engine_->believes_layer())
    call_.drafted = drafts_.expect(work.tokens.front(), most);
  else
    call_.drafted = drafts_.propose(before, work.tokens.front(), most);
  try {
    if (call_.drafted > 0) take_room(static_cast<size_t>(1 + call_.drafted));
  } catch (const std::exception&) {  // nobody has asked for them
    drafts_.forget();
    call_.drafted = 0;
  }
  return call_.drafted;
}

void EngineSession::take_guesses() {
  if (engine_->believes_layer()) drafts_.believe();
}

std::span<const int32_t> EngineSession::rows_of(const Work& work) const {
  return drafts_.proposed() > 0 ? drafts_.rows() : work.tokens;
}

int64_t EngineSession::rows_left(const Work& work) const {
  return call_.foreseen ? 0 : static_cast<int64_t>(rows_of(work).size()) - call_.begun;
}

Mirrored EngineSession::logits_of(int64_t row) const { return logits_.begin().at(row * engine_->variant().vocab_size); }

}  // namespace moeflux
