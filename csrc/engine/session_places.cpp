// The part of a session that knows to which places it can go back.
#include <string>

#include "core/error.h"
#include "engine/footprint.h"
#include "engine/session.h"

namespace moeflux {

void EngineSession::checkpoint() {
  const Use use(*this);
  check_usable();
  settle();
  const int64_t here = position();
  if (checkpoints_.use(here)) return;  // the state at a position is always the same
  checkpoints_.keep(options_.max_checkpoints - 1, here);
  if (here > 0) state_.save_recurrent(*checkpoints_.spare());
  checkpoints_.add(here);
  state_.forget_rows(here, places_);  // those of one that has gone
}

std::vector<int64_t> EngineSession::checkpoints() const {
  const Use use(*this);
  return checkpoints_.positions();
}

int64_t EngineSession::exact_from() const {
  const Use use(*this);
  return state_.exact_from(position());
}

void EngineSession::set_max_checkpoints(int64_t count) {
  const Use use(*this);
  SessionOptions changed = options_;
  changed.max_checkpoints = count;
  changed = resolved(engine_->variant(), changed);
  const int64_t more = count - options_.max_checkpoints;
  const int64_t bytes_before = footprint_of(options_).checkpoints;
  const int64_t bytes = footprint_of(changed).checkpoints;
  if (more <= 0) {
    checkpoints_.keep(count, checkpoints_.newest());
    checkpoints_.drop_rooms(-more);
    state_.forget_rows(position(), places_);
    share_.resize_checkpoints(bytes);
  } else {
    share_.resize_checkpoints(bytes, concat("session of ", count, " checkpoints"));
    try {
      checkpoints_.add_rooms(more);
    } catch (...) {
      share_.resize_checkpoints(bytes_before);
      throw;
    }
  }
  options_ = changed;
}

// The last place up to `target` that there is a way to: position 0, a checkpoint, or one from which on the state is
// exact. With `exact`, StateError unless it is `target`.
EngineSession::Place EngineSession::place_before(const char* call, int64_t target, bool exact) {
  const int64_t here = position();
  if (target < 0 || target > here)
    throw ArgumentError(concat(call, ": expected a position 0 to ", here, ", found ", target));
  const int64_t from = state_.exact_from(here);
  if (target >= from || target == 0) return {target, nullptr};
  const int64_t reached = checkpoints_.newest(target);
  if (exact && reached != target)
    throw StateError(concat(call, ": expected a checkpoint at position ", target,
                            state_.has_recurrent()
                                ? std::string(" (recurrent layers cannot be cut short)")
                                : concat(", or a position from ", from, " on (windows keep only the rows they see)"),
                            ", found the newest before it at ", reached));
  checkpoints_.use(reached);
  return {reached, checkpoints_.at(reached)};
}

}  // namespace moeflux
