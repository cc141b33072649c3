#include "engine/session.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace moeflux {

class EngineSession::Use {
 public:
  explicit Use(const EngineSession& session) : busy_(session.busy_) {
    session.engine_->check_process();
    if (busy_.exchange(true, std::memory_order_acquire))
      throw StateError("session: expected one caller at a time, found a call under way in another thread");
  }
  ~Use() { busy_.store(false, std::memory_order_release); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  std::atomic<bool>& busy_;
};

namespace {

constexpr int64_t default_max_context = 32768;

int64_t context_of(const Variant& variant, const SessionOptions& options) {
  if (options.max_context == 0) return std::min(variant.max_context, default_max_context);
  if (options.max_context < 1 || options.max_context > variant.max_context)
    throw StateError(concat("max_context: expected 1 to ", variant.max_context, ", found ", options.max_context));
  return options.max_context;
}

DType kv_dtype_of(const SessionOptions& options) {
  if (options.kv_dtype != DType::f32 && options.kv_dtype != DType::bf16)
    throw StateError(concat("kv_dtype: expected F32 or BF16, found ", dtype_name(options.kv_dtype)));
  return options.kv_dtype;
}

}  // namespace

EngineSession::EngineSession(std::shared_ptr<LoadedEngine> engine, const SessionOptions& options)
    : engine_(std::move(engine)),
      max_context_(context_of(engine_->variant(), options)),
      state_(engine_->variant(), max_context_, kv_dtype_of(options), engine_->backend()),
      logits_(engine_->backend().allocate(engine_->variant().vocab_size * 4, "logits")) {
  tokens_.reserve(static_cast<size_t>(max_context_));  // a step allocates nothing
}

// ---- Evaluating
// ---------------------------------------------------------------------------------------------------------

void EngineSession::check_usable() const {
  if (!unusable_.empty()) throw StateError(concat("session: ", unusable_, "; clear it or restore a state"));
}

void EngineSession::check_tokens(std::span<const int32_t> tokens) const {
  const int64_t vocab = engine_->variant().vocab_size;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      throw StateError(concat("tokens[", i, "]: expected 0 to ", vocab - 1, ", found ", tokens[i]));
  const int64_t end = position() + static_cast<int64_t>(tokens.size());
  if (end > max_context_)
    throw StateError(concat("session: expected at most ", max_context_, " tokens (max_context), found ", end, ": ",
                            position(), " there and ", tokens.size(), " more"));
}

// One chunk. When it fails the position stays; rows beyond it are never read, but recurrent state has no way back.
void EngineSession::evaluate(std::span<const int32_t> tokens, std::span<float> all_logits, StepStats& stats) {
  drop_logits();
  try {
    engine_->forward(tokens, position(), state_, {logits_.get(), 0}, all_logits, stats);
  } catch (const std::exception& error) {
    if (position() == 0)
      state_.clear_recurrent();
    else if (state_.has_recurrent())
      unusable_ = concat("an evaluation failed half-way (", error.what(), ")");
    throw;
  }
  const size_t vocab = static_cast<size_t>(engine_->variant().vocab_size);
  check_finite(all_logits.empty() ? std::span<const float>(View{logits_.get(), 0}.f32(), vocab) : all_logits);
  if (static_cast<int64_t>(tokens_.size()) == position()) tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  position_.store(position() + static_cast<int64_t>(tokens.size()), std::memory_order_relaxed);
  has_logits_ = true;
}

void EngineSession::drop_logits() {
  has_logits_ = false;
  logits_serial_.fetch_add(1, std::memory_order_relaxed);
}

// Damaged weights show here, before anybody samples from them.
void EngineSession::check_finite(std::span<const float> logits) {
  const size_t vocab = static_cast<size_t>(engine_->variant().vocab_size);
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) continue;
    unusable_ = "its logits were not finite";
    throw Error(concat("logits[", i % vocab, "]: expected a finite number, found ", logits[i],
                       ": the weights are damaged (`moeflux verify` tells where) or the state that was restored is"));
  }
}

std::vector<int32_t> EngineSession::tokens() const {
  const Use use(*this);
  return tokens_;
}

int64_t EngineSession::prefill(std::span<const int32_t> tokens, const Progress& progress, std::span<float> all_logits) {
  const Use use(*this);
  check_usable();
  check_tokens(tokens);
  const auto vocab = static_cast<size_t>(engine_->variant().vocab_size);
  if (!all_logits.empty() && all_logits.size() != tokens.size() * vocab)
    throw StateError(concat("logits: expected room for ", tokens.size(), " x ", vocab, ", found ", all_logits.size()));
  const size_t chunk = static_cast<size_t>(engine_->chunk());
  last_ = {};
  size_t done = 0;
  while (done < tokens.size()) {
    const size_t n = std::min(chunk, tokens.size() - done);
    const std::span<float> rows = all_logits.empty() ? all_logits : all_logits.subspan(done * vocab, n * vocab);
    StepStats stats;
    evaluate(tokens.subspan(done, n), rows, stats);
    done += n;
    last_ += stats;
    total_ += stats;
    if (progress && !progress(static_cast<int64_t>(done), static_cast<int64_t>(tokens.size()))) break;
  }
  return static_cast<int64_t>(done);
}

void EngineSession::step(int32_t token) {
  const Use use(*this);
  check_usable();
  check_tokens({&token, 1});
  last_ = {};
  evaluate({&token, 1}, {}, last_);
  total_ += last_;
}

void EngineSession::check_logits() const {
  if (!has_logits_)
    throw StateError("session: expected a token evaluated since it was made, cleared, rewound or restored, found none");
}

std::span<const float> EngineSession::logits() const {
  const Use use(*this);
  check_logits();
  return {View{logits_.get(), 0}.f32(), static_cast<size_t>(engine_->variant().vocab_size)};
}

void EngineSession::copy_logits(std::span<float> out) const {
  const Use use(*this);
  check_logits();
  const auto vocab = static_cast<size_t>(engine_->variant().vocab_size);
  if (out.size() != vocab) throw StateError(concat("logits: expected room for ", vocab, ", found ", out.size()));
  std::memcpy(out.data(), View{logits_.get(), 0}.f32(), out.size_bytes());
}

int32_t EngineSession::argmax() const {
  int32_t id;
  float value;
  top_k({&id, 1}, {&value, 1});
  return id;
}

void EngineSession::top_k(std::span<int32_t> ids, std::span<float> values) const {
  const Use use(*this);
  const int64_t vocab = engine_->variant().vocab_size;
  const auto k = static_cast<int64_t>(ids.size());
  if (k < 1 || k > std::min(vocab, LoadedEngine::most_top_k))
    throw StateError(concat("k: expected 1 to ", std::min(vocab, LoadedEngine::most_top_k), ", found ", k));
  if (values.size() != ids.size()) throw StateError("top_k: expected as many values as ids");
  check_logits();
  engine_->top_k({logits_.get(), 0}, ids, values);
}

// ---- Going back
// ---------------------------------------------------------------------------------------------------------

void EngineSession::clear() {
  const Use use(*this);
  state_.clear_recurrent();
  checkpoints_.clear();
  tokens_.clear();
  position_.store(0, std::memory_order_relaxed);
  unusable_.clear();
  drop_logits();
}

void EngineSession::checkpoint() {
  const Use use(*this);
  check_usable();
  const std::span<const std::byte> recurrent = state_.recurrent();
  const int64_t here = position();
  const auto at = std::lower_bound(checkpoints_.begin(), checkpoints_.end(), here,
                                   [](const Checkpoint& c, int64_t p) { return c.position < p; });
  if (at != checkpoints_.end() && at->position == here) {
    at->used = ++clock_;  // the state at a position is always the same
    return;
  }
  checkpoints_.insert(at, {here, ++clock_, {recurrent.begin(), recurrent.end()}});
  evict_checkpoints(here);
}

// Least recently used first; neither position 0 nor the newest.
void EngineSession::evict_checkpoints(int64_t newest) {
  while (static_cast<int64_t>(checkpoints_.size()) > max_checkpoints_) {
    auto victim = checkpoints_.end();
    for (auto it = checkpoints_.begin(); it != checkpoints_.end(); ++it) {
      if (it->position == 0 || it->position == newest) continue;
      if (victim == checkpoints_.end() || it->used < victim->used) victim = it;
    }
    if (victim == checkpoints_.end()) return;
    checkpoints_.erase(victim);
  }
}

std::vector<int64_t> EngineSession::checkpoints() const {
  const Use use(*this);
  std::vector<int64_t> positions;
  for (const Checkpoint& checkpoint : checkpoints_) positions.push_back(checkpoint.position);
  return positions;
}

void EngineSession::set_max_checkpoints(int64_t count) {
  const Use use(*this);
  if (count < 1) throw StateError(concat("max_checkpoints: expected at least 1, found ", count));
  max_checkpoints_ = count;
}

// Rows after it will be written anew, so what was kept of later positions is of another timeline.
void EngineSession::forget_after(int64_t position) {
  std::erase_if(checkpoints_, [&](const Checkpoint& c) { return c.position > position; });
}

int64_t EngineSession::rewind(int64_t target, bool exact) {
  const Use use(*this);
  check_usable();
  const int64_t here = position();
  if (target < 0 || target > here)
    throw StateError(concat("rewind: expected a position 0 to ", here, ", found ", target));
  if (target == here) return here;

  int64_t reached = target;
  if (state_.has_recurrent() && target != 0) {
    auto newest = checkpoints_.end();
    for (auto it = checkpoints_.begin(); it != checkpoints_.end() && it->position <= target; ++it) newest = it;
    reached = newest == checkpoints_.end() ? 0 : newest->position;
    if (exact && reached != target)
      throw StateError(concat("rewind: expected a checkpoint at position ", target,
                              " (recurrent layers cannot be cut short), found the newest before it at ", reached));
    if (newest != checkpoints_.end()) {
      std::memcpy(state_.recurrent().data(), newest->recurrent.data(), newest->recurrent.size());
      newest->used = ++clock_;
    }
  }
  if (reached == 0) state_.clear_recurrent();
  if (!tokens_.empty()) tokens_.resize(static_cast<size_t>(reached));
  position_.store(reached, std::memory_order_relaxed);
  drop_logits();
  forget_after(reached);
  return reached;
}

// ---- Giving and taking state
// ----------------------------------------------------------------------------------------------

void EngineSession::read_state(const StateVisitor& show) {
  const Use use(*this);
  check_usable();
  for (const StateTensor& tensor : state_.tensors(position())) show(tensor);
}

void EngineSession::restore(int64_t target, std::span<const int32_t> tokens, const StateVisitor& fill) {
  const Use use(*this);
  if (target < 0 || target > max_context_)
    throw StateError(concat("restore: expected a position 0 to ", max_context_, " (max_context), found ", target));
  if (!tokens.empty() && static_cast<int64_t>(tokens.size()) != target)
    throw StateError(concat("restore: expected ", target, " tokens, one a position, found ", tokens.size()));
  unusable_ = "a restore failed half-way";
  drop_logits();
  checkpoints_.clear();
  for (const StateTensor& tensor : state_.tensors(target)) fill(tensor);
  tokens_.assign(tokens.begin(), tokens.end());
  position_.store(target, std::memory_order_relaxed);
  unusable_.clear();
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
