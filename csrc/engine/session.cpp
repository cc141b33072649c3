#include "engine/session.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "engine/asking.h"
#include "engine/draft_pass.h"
#include "engine/footprint.h"
#include "engine/hidden_rows.h"
#include "engine/pass.h"

namespace moeflux {

void EngineSession::enter() const {
  engine_->check_process();
  if (busy_.exchange(true, std::memory_order_acquire))
    throw StateError("session: expected one caller at a time, found a call under way in another thread");
}

// Room for the rows of so many tokens more. What the call does not use is given back when it ends.
class EngineSession::Room {
 public:
  Room(EngineSession& session, size_t tokens) : session_(session) {
    try {
      session_.take_room(tokens);
    } catch (...) {
      session_.drop_room();
      throw;
    }
  }
  ~Room() { session_.drop_room(); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

 private:
  EngineSession& session_;
};

void EngineSession::take_room(size_t tokens) {
  const int64_t end = position() + static_cast<int64_t>(tokens);
  state_.make_room(position(), end, "rows of a session");
  if (draft_memory_) draft_memory_->make_room(position(), end);
}

void EngineSession::drop_room() noexcept {
  const int64_t end = position() + drafts_.ahead();
  state_.end_call(end, places_);
  if (draft_memory_) draft_memory_->end_call(end);
}

static std::optional<MirroredBuffer> surveys(LoadedEngine& engine) {
  const int64_t bytes = survey_bytes(engine.variant(), engine.drafts());
  if (bytes == 0 || engine.backend().shares_memory()) return std::nullopt;
  return std::optional<MirroredBuffer>(std::in_place, engine.backend(), bytes, "surveys");
}

EngineSession::EngineSession(std::shared_ptr<LoadedEngine> engine, const SessionOptions& options)
    : engine_(std::move(engine)),
      options_(resolved(engine_->variant(), options)),
      share_(engine_->session_memory(), footprint_of(options_), host_bytes_of(options_), asked()),
      state_(
          engine_->variant(), options_, engine_->chunk(), engine_->backend(), engine_->row_pools(options_.kv_dtype),
          engine_->has_draft_layer() ? DraftMemory::planned_rows(engine_->variant(), options_, engine_->chunk()) : 0),
      drafts_(engine_->backend(), engine_->draft_source(), engine_->drafts(), state_.recurrent_bytes()),
      logits_(engine_->backend(), logits_bytes(engine_->variant(), engine_->drafts()), "logits"),
      found_(surveys(*engine_)),
      token_room_(engine_->backend().allocate(options_.max_context * 4, Memory::staging, "tokens")),
      checkpoints_(engine_->backend(), state_.recurrent_bytes()),
      places_([this](int64_t first, int64_t last) {
        return (first <= position() && position() <= last) || checkpoints_.has_any(first, last);
      }) {
  checkpoints_.add_rooms(options_.max_checkpoints);
  if (!engine_->has_draft_layer()) return;
  const StateLayout layout = state_layout(engine_->variant(), options_.kv_dtype, nullptr);
  draft_memory_.emplace(engine_->variant(), options_, engine_->chunk(), engine_->drafts(), engine_->backend(),
                        engine_->draft_pools(options_.kv_dtype), layout.rows_bytes(options_, engine_->chunk()));
}

Footprint EngineSession::footprint_of(const SessionOptions& options) const {
  const Backend& backend = engine_->backend();
  return session_footprint(engine_->variant(), options, engine_->drafts(), engine_->chunk(), backend.shares_memory(),
                           backend.delta_room());
}

// What it has in the host's memory, where the device has another.
int64_t EngineSession::host_bytes_of(const SessionOptions& options) const {
  if (engine_->backend().shares_memory()) return 0;
  const Footprint there = session_device_footprint(engine_->variant(), options, engine_->drafts(), engine_->chunk(),
                                                   engine_->backend().delta_room());
  return footprint_of(options).sessions() - there.sessions();
}

// In the words of an error about memory.
std::string EngineSession::asked() const {
  return concat("session of ", options_.max_context, " tokens, ", dtype_name(options_.kv_dtype), ", ",
                options_.max_checkpoints, " checkpoints");
}

// ---- Evaluating ------------------------------------------------------------------------------------------------

void EngineSession::check_usable() const {
  if (unusable_) throw StateError(concat("session: ", why_unusable(), "; clear it or restore a state"));
}

// The cause may have been that there is no more memory.
void EngineSession::break_off(const char* what, const std::exception* cause) noexcept {
  unusable_ = true;
  try {
    why_ = cause ? concat(what, " (", cause->what(), ")") : what;
  } catch (const std::bad_alloc&) {
    why_.clear();
  }
}

void EngineSession::check_tokens(std::span<const int32_t> tokens) const {
  const int64_t vocab = engine_->variant().vocab_size;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      throw ArgumentError(concat("tokens[", i, "]: expected 0 to ", vocab - 1, ", found ", tokens[i]));
  const int64_t end = position() + static_cast<int64_t>(tokens.size());
  if (end > options_.max_context)
    throw StateError(concat("session: expected at most ", options_.max_context, " tokens (max_context), found ", end,
                            ": ", position(), " there and ", tokens.size(), " more"));
}

// A copy of the recurrent state here: that of a checkpoint, or, with `make`, one in the room of a checkpoint that is
// still to come.
const Buffer* EngineSession::recurrent_copy(bool make) {
  if (const Buffer* copy = checkpoints_.at(position())) return copy;
  const Buffer* spare = make ? checkpoints_.spare() : nullptr;
  if (spare) state_.save_recurrent(*spare);
  return spare;
}

void EngineSession::check(const Work& work) const {
  check_usable();
  check_tokens(work.tokens);
  if (engine_->needs_past() && known_tokens_ != position())
    throw StateError(
        "session: expected the tokens before these, which choose rows of n-gram tables, found a state that "
        "was restored without them");
  const auto vocab = static_cast<size_t>(engine_->variant().vocab_size);
  if (!work.all_logits.empty() && work.all_logits.size() != work.tokens.size() * vocab)
    throw ArgumentError(
        concat("logits: expected room for ", work.tokens.size(), " x ", vocab, ", found ", work.all_logits.size()));
  check_hidden_rows(engine_->variant(), work);
}

void EngineSession::check_whole(const char* call) const {
  if (const Variant& variant = engine_->variant(); !variant.is_whole())
    throw StateError(concat(call, ": expected an engine with all layers, found one with ", variant.layers_named(),
                            ", whose sessions go on by `evaluate`"));
}

// When a call fails, the position stays. Rows beyond the position are never read, but recurrent state needs a way back.
void EngineSession::begin(bool copies) {
  const bool needs_copy = state_.has_recurrent() && position() > 0;
  call_ = {};
  call_.copy = needs_copy ? recurrent_copy(copies) : nullptr;
  call_.can_go_back = call_.copy || !needs_copy;
}

Piece EngineSession::next(const Work& work, int64_t rows, std::span<const int32_t> given) {
  const std::span<const int32_t> tokens = rows_of(work);
  const auto from = static_cast<size_t>(call_.begun);
  const auto count = static_cast<size_t>(rows);
  Piece piece;
  piece.tokens = tokens.subspan(from, count);
  piece.state = &state_;
  piece.position = position() + call_.begun;
  piece.drafts = drafts_.proposed();
  piece.copies = drafts_.copies();
  piece.past = {View{token_room_.get()}.host<int32_t>(), static_cast<size_t>(known_tokens_)};
  piece.given = given.size() > tokens.size() ? given : tokens;
  state_.enter(piece.position, piece.position + rows, places_);
  if (draft_memory_) piece.draft = draft_memory_->enter(piece.position, piece.position + rows, call_.begun == 0);
  call_.begun += rows;
  if (!work.all_logits.empty()) {
    const size_t vocab = work.all_logits.size() / work.tokens.size();
    piece.all_logits = work.all_logits.subspan(from * vocab, count * vocab);
  }
  const auto width = static_cast<size_t>(engine_->variant().row_width());
  if (!work.hidden_in.empty()) piece.hidden_in = work.hidden_in.subspan(from * width, count * width);
  if (!work.hidden_out.empty()) piece.hidden_out = work.hidden_out.subspan(from * width, count * width);
  call_.yields_logits = from + count == tokens.size() && yields_logits(work);
  if (call_.yields_logits) {
    piece.logits = logits_.begin();
    call_.was_surveyed = surveyed_;
    surveyed_ = found_ && engine_->backend().surveys() && piece.all_logits.empty() ? wanted_ : Surveyed{};
    if (surveyed_.any) piece.found = found_->begin();
    piece.factor = surveyed_.factor;
    if (surveyed_.factor > 0) piece.lists = list_of(0);
    row_here_ = -1;
    was_asked_ = false;
  }
  return piece;
}

void EngineSession::take_back(const std::exception* cause) noexcept {
  if (draft_memory_) draft_memory_->lose();
  if (call_.can_go_back)
    go_back(call_.copy);
  else if (cause)
    break_off("an evaluation failed half-way", cause);
  if (call_.has_logits || (cause && call_.yields_logits))
    drop_logits();
  else if (call_.yields_logits)
    surveyed_ = call_.was_surveyed;
}

void EngineSession::check_result(const Work& work) {
  drop_logits();
  const Variant& variant = engine_->variant();
  if (!variant.ends()) return check_finite("hidden rows", work.hidden_out, static_cast<size_t>(variant.row_width()));
  const auto vocab = static_cast<size_t>(variant.vocab_size);
  if (!work.all_logits.empty()) return check_finite("logits", work.all_logits, vocab);
  const int64_t row = call_.foreseen ? drafts_.row() + 1 : 0;
  if (!work.logits) return;
  if (!surveyed_.any || head_of(row).odd >= 0) check_finite("logits", read_row(row), vocab);
}

// Whether the session has logits after it.
bool EngineSession::yields_logits(const Work& work) const {
  return engine_->variant().ends() && (work.logits || !work.all_logits.empty());
}

void EngineSession::commit(const Work& work) noexcept {
  if (known_tokens_ == position()) add_tokens(work.tokens);
  position_.store(position() + static_cast<int64_t>(work.tokens.size()), std::memory_order_relaxed);
  if (call_.foreseen)
    drafts_.take();
  else
    drafts_.keep();
  if (draft_memory_) draft_memory_->stand(drafts_.row());
  logits_row_ = drafts_.row();
  has_logits_ = yields_logits(work);
}

// What a call has cost counts in full for each of its sessions, but for the tokens and the drafts.
void EngineSession::count(const StepStats& call, int64_t tokens) {
  last_ = call;
  last_.tokens = tokens;
  last_.drafted = call_.drafted;
  last_.accepted = call_.foreseen;
  last_.drafts_pay = engine_->draft_governor().pays();
  total_ += last_;
}

// Evaluates one chunk. A copy of recurrent state is little beside the work for several tokens, and much beside the work
// for one.
void EngineSession::evaluate(const Work& work, std::span<const int32_t> given, const Interruption& interruption,
                             StepStats& stats) {
  Asking asking(interruption);
  if (asking.ask()) asking.ask()();
  begin(work.tokens.size() > 1);
  if (draft(work, engine_->chunk() - 1) > 0) draft_with_layer(*engine_, std::array{this}, asking.ask(), stats);
  try {
    Pass pass(*engine_, asking.ask());
    pass.add(next(work, static_cast<int64_t>(rows_of(work).size()), given));
    StepStats of_pass;
    pass.run(can_go_back() ? asking.ask() : Interruption{}, of_pass);
    stats += of_pass;
  } catch (const std::exception& error) {
    take_back(asking.given_up() ? nullptr : &error);
    throw;
  }
  check_result(work);
  commit(work);
}

// Goes back to the recurrent state before a call that failed: that of a copy, or the zeros of position 0.
void EngineSession::go_back(const Buffer* copy) noexcept {
  try {
    if (position() == 0)
      state_.clear_recurrent();
    else if (copy)
      state_.load_recurrent(*copy);
  } catch (const std::exception& error) {
    break_off("the state before an evaluation that failed is lost", &error);
  }
}

void EngineSession::drop_logits() {
  has_logits_ = false;
  logits_serial_.fetch_add(1, std::memory_order_relaxed);
}

// The caller has checked that there is room for so many more positions.
void EngineSession::add_tokens(std::span<const int32_t> tokens) noexcept {
  if (!tokens.empty())
    std::memcpy(View{token_room_.get()}.host<int32_t>() + known_tokens_, tokens.data(), tokens.size_bytes());
  known_tokens_ += static_cast<int64_t>(tokens.size());
}

std::vector<int32_t> EngineSession::tokens() const {
  const Use use(*this);
  const int32_t* first = View{token_room_.get()}.host<int32_t>();
  return {first, first + known_tokens_};
}

Evaluated EngineSession::prefill(std::span<const int32_t> tokens, const Progress& progress, std::span<float> all_logits,
                                 const Interruption& interruption) {
  const Use use(*this);
  check_whole("prefill");
  check({this, tokens, all_logits});
  settle();
  const Room room(*this, tokens.size());
  const auto vocab = static_cast<size_t>(engine_->variant().vocab_size);
  const size_t chunk = static_cast<size_t>(engine_->chunk());
  last_ = {};
  size_t done = 0;
  while (done < tokens.size()) {
    const size_t n = std::min(chunk, tokens.size() - done);
    const std::span<float> rows = all_logits.empty() ? all_logits : all_logits.subspan(done * vocab, n * vocab);
    StepStats stats;
    evaluate({this, tokens.subspan(done, n), rows}, tokens.subspan(done), interruption, stats);
    done += n;
    last_ += stats;
    total_ += stats;
    if (progress && !progress(static_cast<int64_t>(done), static_cast<int64_t>(tokens.size()))) break;
  }
  return {static_cast<int64_t>(done), logits_serial()};
}

Evaluated EngineSession::step(int32_t token, const Interruption& interruption, std::optional<int64_t> serial) {
  const Use use(*this);
  if (serial && *serial != logits_serial())
    throw StateError("step: expected the logits that the token was chosen from, found the session used since");
  check_whole("step");
  const Work work = {this, {&token, 1}};
  check(work);
  StepStats stats;
  if (begin_foreseen(work)) {
    if (interruption) interruption();
    check_result(work);
    commit(work);
  } else {
    const Room room(*this, 1);
    evaluate(work, work.tokens, interruption, stats);
    engine_->draft_governor().add({stats.seconds, 1, call_.drafted});
  }
  count(stats, 1);
  return {1, logits_serial()};
}

// ---- Going back ------------------------------------------------------------------------------------------------

// What fails leaves pieces.
template <typename Change>
void EngineSession::change_state(const char* what, const Change& change) {
  try {
    change();
  } catch (const std::exception& error) {
    break_off(what, &error);
    throw;
  }
}

void EngineSession::clear() {
  const Use use(*this);
  drafts_.forget();
  change_state("a clear failed half-way", [&] { state_.clear_recurrent(); });
  checkpoints_.forget_after(-1);
  known_tokens_ = 0;
  position_.store(0, std::memory_order_relaxed);
  if (draft_memory_) draft_memory_->begin_anew(0);
  drop_room();
  unusable_ = false;
  drop_logits();
}

std::unique_ptr<Session> EngineSession::fork(std::optional<int64_t> wanted) {
  const Use use(*this);
  check_usable();
  settle();
  const Place place = place_before("fork", wanted.value_or(position()), true);
  const bool is_here = place.position == position();
  auto other = std::make_unique<EngineSession>(engine_, options_);
  other->state_.become(state_, place.position, is_here ? &state_.recurrent() : place.recurrent);
  if (draft_memory_) other->draft_memory_->become(*draft_memory_, place.position, is_here);
  const auto known = static_cast<size_t>(std::min(known_tokens_, place.position));
  other->add_tokens({View{token_room_.get()}.host<int32_t>(), known});
  other->position_.store(place.position, std::memory_order_relaxed);
  if (is_here && has_logits_) {
    const int64_t bytes = engine_->variant().vocab_size * 4;
    std::memcpy(other->logits_of(0).values<float>(), read_row(logits_row_).data(), static_cast<size_t>(bytes));
    other->logits_of(0).upload(engine_->backend(), bytes);
    other->has_logits_ = true;
  }
  return other;
}

int64_t EngineSession::rewind(int64_t target, bool exact) {
  const Use use(*this);
  check_usable();
  settle();
  const Place place = place_before("rewind", target, exact);
  const int64_t reached = place.position;
  if (reached == position()) return reached;
  if (place.recurrent) change_state("a rewind failed half-way", [&] { state_.load_recurrent(*place.recurrent); });
  if (reached == 0) change_state("a rewind failed half-way", [&] { state_.clear_recurrent(); });
  known_tokens_ = std::min(known_tokens_, reached);
  position_.store(reached, std::memory_order_relaxed);
  if (draft_memory_) draft_memory_->go_to(reached);
  checkpoints_.forget_after(reached);
  drop_room();
  drop_logits();
  return reached;
}

// ---- Giving and taking state -----------------------------------------------------------------------------------

void EngineSession::make_room(int64_t tokens) {
  const Use use(*this);
  check_usable();
  if (tokens < 0 || tokens > options_.max_context - position())
    throw ArgumentError(
        concat("make_room: expected 0 to ", options_.max_context - position(), " tokens, found ", tokens));
  take_room(static_cast<size_t>(tokens));
}

void EngineSession::read_state(const StateVisitor& show) {
  const Use use(*this);
  check_usable();
  settle();
  state_.complete_recurrent();
  show(state_.tensors(position()));
}

void EngineSession::restore(int64_t target, std::span<const int32_t> tokens, const StateVisitor& fill) {
  const Use use(*this);
  if (target < 0 || target > options_.max_context)
    throw ArgumentError(
        concat("restore: expected a position 0 to ", options_.max_context, " (max_context), found ", target));
  if (!tokens.empty() && static_cast<int64_t>(tokens.size()) != target)
    throw ArgumentError(concat("restore: expected ", target, " tokens, one a position, found ", tokens.size()));
  drafts_.forget();
  const std::vector<StateTensor> tensors = state_.tensors(target);
  state_.renew(target, "restore");
  break_off("a restore failed half-way");
  drop_logits();
  checkpoints_.forget_after(-1);
  try {
    state_.forget_pending();
    fill(tensors);
  } catch (...) {
    state_.end_call(0, places_);  // they are worth nothing
    throw;
  }
  known_tokens_ = 0;
  add_tokens(tokens);
  position_.store(target, std::memory_order_relaxed);
  if (draft_memory_) draft_memory_->begin_anew(target);
  drop_room();
  unusable_ = false;
}

StepStats EngineSession::last() const {
  const Use use(*this);
  return last_;
}

StepStats EngineSession::total() const {
  const Use use(*this);
  return total_;
}

}  // namespace moeflux
