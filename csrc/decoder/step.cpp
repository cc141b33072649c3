#include "decoder/step.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "core/error.h"

namespace moeflux {

Decoder::Step::Step(Decoder& decoder) : decoder_(decoder) {
  const std::lock_guard lock(decoder.mutex_);
  if (decoder.stepping_)
    throw StateError("decoder: expected one caller of step at a time, found a step under way in another thread");
  running_.reserve(decoder.requests_.size());
  for (const auto& each : decoder.requests_) {
    if (each->new_mask) each->mask = std::exchange(each->new_mask, {});
    running_.push_back(each.get());
  }
  decoder.stepping_ = true;
}

Decoder::Step::~Step() {
  const std::lock_guard lock(decoder_.mutex_);
  for (auto& each : decoder_.requests_) {
    if (!each->removed && !(each->over && each->events.empty())) continue;
    each->behind = std::move(decoder_.gone_);
    decoder_.gone_ = std::move(each);
  }
  std::erase(decoder_.requests_, nullptr);
  decoder_.stepping_ = false;
}

std::vector<DecoderEvent> Decoder::Step::run(const Interruption& interruption) {
  choose();
  share_rows();
  evaluate(std::move(parts_), interruption);
  choose();
  go_on(interruption);
  return tell();
}

// For all who can and have no token of this step.
void Decoder::Step::choose() {
  std::vector<Running*> choosing;
  for (Running* const each : running_)
    if (each->can_choose() && !each->has_told_token()) choosing.push_back(each);
  choose(choosing);
}

// Each has a sampler of its own, so they do not wait for each other.
void Decoder::Step::choose(std::span<Running* const> choosing) {
  if (choosing.size() == 1) return choosing.front()->choose();
  decoder_.engine_->parallel(static_cast<int64_t>(choosing.size()),
                             [&](int64_t i) { choosing[static_cast<size_t>(i)]->choose(); });
}

// As long as tokens are chosen that a call before has evaluated as drafts.
void Decoder::Step::go_on(const Interruption& interruption) {
  for (;;) {
    std::vector<Part> parts;
    std::vector<Running*> further;
    for (Running* const each : running_) {
      if (!each->is_foreseen()) continue;
      parts.push_back({each, each->tokens(1)});
      further.push_back(each);
    }
    evaluate(std::move(parts), interruption);
    std::erase_if(further, [](const Running* each) { return !each->can_choose(); });
    if (further.empty()) return;
    choose(further);
  }
}

// Tokens that were chosen, one of each request, and prompts, the oldest first. If there are too many of the former,
// they take turns.
void Decoder::Step::share_rows() {
  std::vector<Running*> answering;
  std::vector<Running*> reading;
  for (Running* const each : running_)
    if (!each->over && (each->next || each->reads())) (each->next ? answering : reading).push_back(each);
  const auto most = static_cast<size_t>(decoder_.rows_ - (reading.empty() ? 0 : 1));
  if (answering.size() > most) {
    std::ranges::stable_sort(answering, {}, &Running::served);
    answering.resize(most);
  }
  int64_t left = decoder_.rows_ - static_cast<int64_t>(answering.size());
  if (!answering.empty()) left = std::min(left, decoder_.prompt_rows());
  for (Running* const each : answering) parts_.push_back({each, each->tokens(1)});
  for (Running* const each : reading) {
    if (left == 0) break;
    parts_.push_back({each, each->tokens(left)});
    left -= static_cast<int64_t>(parts_.back().tokens.size());
  }
}

// All together. When that fails, those whose fault it is go no further, and the others are evaluated without them. When
// it is nobody's, each is evaluated alone, so that it fails whom it concerns.
void Decoder::Step::evaluate(std::vector<Part> parts, const Interruption& interruption) {
  while (!parts.empty()) {
    std::vector<Work> work(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      work[i].session = parts[i].running->request.session;
      work[i].tokens = parts[i].tokens;
      const Running& running = *parts[i].running;
      work[i].logits = running.next || running.read + parts[i].tokens.size() == running.request.tokens.size();
    }
    bool is_told = true;
    try {
      decoder_.engine_->evaluate(work, interruption);
    } catch (const Cancelled&) {
      throw;
    } catch (const Error& error) {
      is_told = refuse(parts, work, error);
      if (is_told) continue;
    }
    if (!is_told) {
      for (const Part& each : parts) evaluate({each}, interruption);
      return;
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      Running& running = *parts[i].running;
      running.served = ++decoder_.served_;
      if (work[i].failure.empty())
        running.evaluated(work[i]);
      else
        running.fail(work[i].failure);
    }
    return;
  }
}

// Takes those out whose fault the error is; a request that is alone is always at fault. False when it is nobody's.
bool Decoder::Step::refuse(std::vector<Part>& parts, const std::vector<Work>& work, const Error& error) {
  const bool is_budget = dynamic_cast<const BudgetError*>(&error) != nullptr;
  const bool alone = parts.size() == 1;
  size_t left = 0;
  for (size_t i = 0; i < work.size(); ++i) {
    const std::string& failure = work[i].failure;
    if (failure.empty() && !alone) {
      parts[left++] = parts[i];
      continue;
    }
    if (is_budget)
      parts[i].running->tell().error = "budget";
    else
      parts[i].running->fail(failure.empty() ? error.what() : failure);
  }
  const bool any = left < parts.size();
  parts.resize(left);
  return any;
}

std::vector<DecoderEvent> Decoder::Step::tell() {
  std::vector<DecoderEvent> events;
  events.reserve(running_.size());
  for (Running* const each : running_) std::ranges::move(std::exchange(each->events, {}), std::back_inserter(events));
  return events;
}

}  // namespace moeflux
