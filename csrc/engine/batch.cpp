#include "engine/batch.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "engine/asking.h"
#include "engine/draft_pass.h"
#include "engine/engine.h"
#include "engine/session.h"

namespace moeflux {
namespace {

EngineSession& session_of(const Work& work) { return static_cast<EngineSession&>(*work.session); }

// What goes wrong with one piece of work says with which, there and in the error.
template <typename Body>
void at_work(std::span<Work> work, size_t index, const Body& body) {
  const auto said = [&](const std::exception& error) {
    work[index].failure = error.what();
    return concat("work[", index, "]: ", error.what());
  };
  try {
    body();
  } catch (const ArgumentError& error) {
    throw ArgumentError(said(error));
  } catch (const StateError& error) {
    throw StateError(said(error));
  } catch (const BudgetError& error) {
    throw BudgetError(said(error), error.missing);
  }
}

// Throws the error under way once more, with something added. What is not ours stays as it is.
[[noreturn]] void rethrow_with(const std::string& more) {
  try {
    throw;
  } catch (const DeviceError& error) {
    throw DeviceError(error.what() + more);
  } catch (const NotFoundError& error) {
    throw NotFoundError(error.what() + more);
  } catch (const IoError& error) {
    throw IoError(error.what() + more);
  } catch (const StateError& error) {
    throw StateError(error.what() + more);
  } catch (const FormatError& error) {
    throw FormatError(error.what() + more);
  } catch (const BudgetError& error) {
    throw BudgetError(error.what() + more, error.missing);
  }
}

}  // namespace

Batch::~Batch() {
  for (const Work& work : work_.first(taken_)) {
    session_of(work).drop_room();
    session_of(work).leave();
  }
}

void Batch::take_sessions() {
  if (work_.empty()) throw ArgumentError("evaluate: expected work for one session or more, found none");
  for (Work& work : work_) work.failure.clear();
  for (size_t i = 0; i < work_.size(); ++i) at_work(work_, i, [&] { take_session(i); });
}

// Nobody waits for a session, so two batches cannot wait for each other.
void Batch::take_session(size_t index) {
  const Work& work = work_[index];
  auto* session = dynamic_cast<EngineSession*>(work.session);
  if (!session || !session->is_of(engine_))
    throw ArgumentError(concat("expected a session of this model, found ", session ? "one of another" : "none"));
  const std::span<Work> before = work_.first(index);
  const auto same = std::ranges::find(before, work.session, &Work::session);
  if (same != before.end())
    throw ArgumentError(concat("expected each session once, found that of work[", same - before.begin(), "] again"));
  session->enter();
  ++taken_;
  if (work.tokens.empty()) throw ArgumentError("tokens: expected one or more, found none");
  session->check(work);
  if (!session->begin_foreseen(work)) left_ += static_cast<int64_t>(work.tokens.size());
}

// Single tokens go through the last pass, so that no failure comes after it: of a session with a single token there is
// no copy of the recurrent state. If they need several passes, all but the last need one too.
void Batch::prepare(const Interruption& interruption, StepStats& stats) {
  const auto is_single = [](const Work& work) { return work.tokens.size() == 1 && !session_of(work).is_foreseen(); };
  for (size_t i = 0; i < work_.size(); ++i)
    if (!session_of(work_[i]).is_foreseen())
      at_work(work_, i, [&] { session_of(work_[i]).take_room(work_[i].tokens.size()); });
  const int64_t last_begins = (left_ - 1) / engine_.chunk() * engine_.chunk();
  int64_t at = left_ - std::ranges::count_if(work_, is_single);
  for (const Work& work : work_)
    if (!session_of(work).is_foreseen()) session_of(work).begin(work.tokens.size() > 1 || at++ < last_begins);
  draft(interruption, stats);
}

// What is left of a single pass.
void Batch::draft(const Interruption& interruption, StepStats& stats) {
  std::vector<EngineSession*> drafting;
  for (const Work& work : work_) {
    EngineSession& session = session_of(work);
    if (session.is_foreseen() || left_ >= engine_.chunk()) continue;
    const int64_t drafted = session.draft(work, engine_.chunk() - left_);
    left_ += drafted;
    if (drafted > 0 && engine_.has_draft_layer()) drafting.push_back(&session);
  }
  draft_with_layer(engine_, drafting, interruption, stats);
}

StepStats Batch::run(const Interruption& interruption) {
  take_sessions();
  Asking asking(interruption);
  if (asking.ask()) asking.ask()();
  StepStats stats;
  prepare(asking.ask(), stats);
  try {
    while (left_ > 0) {
      Pass pass(engine_, can_go_back_ ? asking.ask() : Interruption{});
      fill(pass);
      StepStats of_pass;
      pass.run(can_go_back_ ? asking.ask() : Interruption{}, of_pass);
      stats += of_pass;
      left_ -= pass.rows();
    }
    check_results();
  } catch (const std::exception& error) {
    take_back(asking.given_up() ? nullptr : &error);
    if (const std::string names = lost(); !names.empty())
      rethrow_with(concat("; ", names, " cannot go back: clear them or restore a state"));
    throw;
  }
  commit(stats);
  return stats;
}

// As many rows as one pass may have, of as many sessions as these are.
void Batch::fill(Pass& pass) {
  for (const Work& work : work_) session_of(work).end_pass();
  for (const bool single : {false, true})
    for (const Work& work : work_) {
      EngineSession& session = session_of(work);
      const int64_t n = std::min(session.rows_left(work), engine_.chunk() - pass.rows());
      if ((work.tokens.size() == 1) != single || n == 0) continue;
      pass.add(session.next(work, n));
      can_go_back_ &= session.can_go_back();
    }
}

// After an error, or without one when the call was given up.
void Batch::take_back(const std::exception* cause) {
  for (Work& work : work_) {
    EngineSession& session = session_of(work);
    if (session.begun() > 0) session.take_back(cause);
    if (!session.is_usable()) work.failure = session.why_unusable();
  }
}

std::string Batch::lost() const {
  std::string names;
  for (size_t i = 0; i < work_.size(); ++i)
    if (!work_[i].failure.empty()) names += concat(names.empty() ? "" : ", ", "the session of work[", i, "]");
  return names;
}

// A session whose logits are not finite breaks alone.
void Batch::check_results() {
  for (Work& work : work_) {
    try {
      session_of(work).check_result(work);
    } catch (const Error& error) {
      work.failure = error.what();
    }
  }
}

void Batch::commit(StepStats& stats) noexcept {
  int64_t tokens = 0;
  int64_t evaluated = 0;
  for (Work& work : work_) {
    EngineSession& session = session_of(work);
    if (work.failure.empty()) session.commit(work);
    const auto count = static_cast<int64_t>(work.tokens.size());
    session.count(stats, count);
    work.serial = session.logits_serial();
    tokens += count;
    if (!session.is_foreseen()) evaluated += count;
    stats.drafted += session.drafted();
    stats.accepted += session.is_foreseen();
  }
  stats.tokens = tokens;
  // Prompts take their own time.
  const bool single = std::ranges::all_of(work_, [](const Work& work) { return work.tokens.size() == 1; });
  if (single && evaluated > 0) engine_.draft_governor().add({stats.seconds, evaluated, stats.drafted});
}

}  // namespace moeflux
