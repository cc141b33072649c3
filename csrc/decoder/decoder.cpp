#include "decoder/decoder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"
#include "decoder/ahead.h"
#include "decoder/running.h"
#include "decoder/step.h"

namespace moeflux {
namespace {

constexpr int64_t min_rows = 2;  // one for those who answer, one for prompts
constexpr int64_t default_prompt_rows = 64;

}  // namespace

Decoder::Decoder(std::shared_ptr<Engine> engine, int64_t rows)
    : engine_(std::move(engine)), rows_(rows > 0 ? rows : std::max(engine_->chunk(), min_rows)) {
  if (const Variant& variant = engine_->variant(); !variant.is_whole())
    throw StateError(concat("Decoder: expected an engine with all layers, found one with ", variant.layers_named()));
  if (rows != 0 && rows < min_rows)
    throw ArgumentError(concat("rows: expected 0, or ", min_rows, " or more, found ", rows));
  prompt_rows_ = std::min(rows_, default_prompt_rows);
  ahead_ = std::make_unique<Ahead>(*this);
}

Decoder::~Decoder() = default;

void Decoder::set_prompt_rows(int64_t rows) {
  if (rows < 0) throw ArgumentError(concat("prompt_rows: expected 0 or more, found ", rows));
  prompt_rows_.store(rows, std::memory_order_relaxed);
}

// ---- Requests -------------------------------------------------------------------------------------------------------

void Decoder::check(const Request& request) const {
  if (request.max_tokens < 1) throw ArgumentError(concat("max_tokens: expected 1 or more, found ", request.max_tokens));
  if (const std::optional<int64_t> asked = request.log_probabilities) {
    const int64_t most = std::min(max_log_probabilities, engine_->variant().vocab_size);
    if (*asked < 0 || *asked > most)
      throw ArgumentError(concat("log_probabilities: expected 0 to ", most, ", found ", *asked));
  }
  const int64_t vocab = engine_->variant().vocab_size;
  for (const int32_t token : request.tokens)
    if (token < 0 || token >= vocab)
      throw ArgumentError(concat("tokens: expected 0 to ", vocab - 1, ", found ", token));
  const auto count = static_cast<int64_t>(request.tokens.size());
  const int64_t room = request.session->max_context() - request.session->position();
  if (count > room)
    throw ArgumentError(concat("tokens: expected at most ", room, " more in a context of ",
                               request.session->max_context(), ", found ", count));
  if (count == 0) request.session->read_logits([](std::span<const float>) {});
}

int64_t Decoder::add(Request request) {
  check(request);
  std::ranges::sort(request.borders);
  const std::lock_guard lock(mutex_);
  for (const auto& other : requests_)
    if (!other->removed && (other->request.session == request.session || other->request.sampler == request.sampler))
      throw ArgumentError(concat("expected a session and a sampler of its own, found one of request ", other->id));
  requests_.reserve(requests_.size() + 1);
  requests_.push_back(std::make_unique<Running>(ids_ + 1, std::move(request)));
  return ++ids_;
}

Decoder::Running* Decoder::find(int64_t id) const {
  const auto found = std::ranges::lower_bound(requests_, id, {}, [](const auto& each) { return each->id; });
  return found != requests_.end() && (*found)->id == id && !(*found)->removed ? found->get() : nullptr;
}

void Decoder::set_mask(int64_t id, std::optional<std::span<const uint32_t>> allowed) {
  std::vector<uint32_t> mask;
  if (allowed) {
    const int64_t words = (engine_->variant().vocab_size + 31) / 32;
    if (static_cast<int64_t>(allowed->size()) != words)
      throw ArgumentError(concat("mask: expected ", words, " words of 32 bits, found ", allowed->size()));
    mask.assign(allowed->begin(), allowed->end());
  }
  const std::lock_guard lock(mutex_);
  Running* const running = find(id);
  if (!running || !running->request.masked)
    throw ArgumentError(concat("mask: expected the id of a masked request, found ", id));
  running->new_mask = std::move(mask);
}

bool Decoder::remove(int64_t id) {
  std::unique_ptr<Running> gone;  // goes when nobody waits for the lock any more
  const std::lock_guard lock(mutex_);
  Running* const running = find(id);
  if (!running) return true;
  if (stepping_) {
    running->removed = true;
    return false;
  }
  const auto place = std::ranges::find(requests_, running, [](const auto& each) { return each.get(); });
  gone = std::move(*place);
  requests_.erase(place);
  return true;
}

// ---- A step ---------------------------------------------------------------------------------------------------------

std::vector<DecoderEvent> Decoder::step(const Interruption& interruption) {
  class Farewell {
   public:
    explicit Farewell(Decoder& decoder) : decoder_(decoder) {}
    ~Farewell() { decoder_.let_go(); }

   private:
    Decoder& decoder_;
  };
  const Farewell farewell(*this);
  if (std::optional<std::vector<DecoderEvent>> events = ahead_->take()) return std::move(*events);
  return step_now(interruption);
}

std::vector<DecoderEvent> Decoder::step_now(const Interruption& interruption) {
  Step step(*this);
  return step.run(interruption);
}

// They go when nobody waits for the lock any more, because their owners may wait for somebody who does.
void Decoder::let_go() {
  std::unique_ptr<Running> gone;
  {
    const std::lock_guard lock(mutex_);
    gone = std::move(gone_);
  }
  while (gone) gone = std::move(gone->behind);
}

// ---- Steps ahead ----------------------------------------------------------------------------------------------------

bool Decoder::go_ahead() {
  if (!can_go_ahead()) return false;
  ahead_->begin();
  return true;
}

void Decoder::end_ahead(bool at_once) { ahead_->end(at_once); }

bool Decoder::is_ahead() const { return ahead_->is_under_way(); }

bool Decoder::can_go_ahead() const {
  const std::lock_guard lock(mutex_);
  return !stepping_ && !requests_.empty() && std::ranges::all_of(requests_, [](const auto& each) {
    return each->next && !each->over && !each->removed && !each->request.masked && !each->request.stepwise;
  });
}

}  // namespace moeflux
