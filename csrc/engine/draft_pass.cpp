#include "engine/draft_pass.h"

#include <algorithm>
#include <array>

#include "core/stopwatch.h"
#include "engine/engine.h"
#include "engine/rope_angles.h"
#include "engine/session.h"

namespace moeflux {

void draft_with_layer(LoadedEngine& engine, std::span<EngineSession* const> sessions, const Interruption& interruption,
                      StepStats& stats) {
  if (!engine.has_draft_layer()) return;
  const auto most = static_cast<size_t>(DraftPass::max_sessions(engine));
  for (size_t first = 0; first < sessions.size(); first += most) {
    DraftPass pass(engine, interruption);
    StepStats of_pass;
    pass.run(sessions.subspan(first, std::min(most, sessions.size() - first)), interruption, of_pass);
    stats += of_pass;
  }
}

DraftPass::DraftPass(LoadedEngine& engine, const Interruption& waiting)
    : engine_(engine), turn_(engine.take_turn(waiting)) {
  engine_.next_step_.forget();
  engine_.draft_pieces_.clear();
}

int64_t DraftPass::max_sessions(const LoadedEngine& engine) { return engine.scratch_.logit_rows; }

void DraftPass::run(std::span<EngineSession* const> sessions, const Interruption& halfway, StepStats& stats) {
  const Stopwatch watch;
  Recorder& recorder = engine_.recorder_;
  recorder.begin(stats, halfway);
  engine_.experts_.begin(0);
  try {
    for (size_t guess = 1; add_rows(sessions, guess); ++guess) {
      run_layer(stats);
      choose(stats);
      for (const Piece& piece : engine_.draft_pieces_)
        sessions[static_cast<size_t>(piece.drafts)]->guesses()[guess] =
            engine_.picks_.begin().values<int32_t>()[piece.first];
    }
    recorder.finish();
    engine_.experts_.finish(stats);
  } catch (...) {
    recorder.abandon();
    engine_.experts_.abandon();
    throw;
  }
  engine_.count_tables();
  for (EngineSession* const session : sessions) session->take_guesses();
  const double seconds = watch.seconds();
  stats.seconds += seconds;
  stats.compute_seconds += seconds - stats.read_wait_seconds;
}

// One for each session that wants so many guesses. Its `drafts` say which session. False when there is none.
bool DraftPass::add_rows(std::span<EngineSession* const> sessions, size_t guess) {
  const Model& model = engine_.model_;
  const int64_t h = model.variant.hidden_size;
  const Scratch& s = engine_.scratch_;
  Recorder& recorder = engine_.recorder_;
  std::vector<Piece>& pieces = engine_.draft_pieces_;
  if (guess == 1) {
    for (size_t i = 0; i < sessions.size(); ++i) {
      Piece& piece = pieces.emplace_back();
      piece.draft = sessions[i]->draft_piece();
      piece.state = piece.draft.state;
      piece.position = piece.draft.row;
      piece.drafts = static_cast<int64_t>(i);
    }
  }
  const auto guesses = [&](const Piece& piece) { return sessions[static_cast<size_t>(piece.drafts)]->guesses(); };
  std::erase_if(pieces, [&](const Piece& piece) { return guesses(piece).size() <= guess; });
  rows_ = 0;
  for (Piece& piece : pieces) {
    const View known = guess > 1 ? s.normed.at(piece.first * h) : piece.draft.before;
    if (guess > 1) ++piece.position;
    piece.first = rows_++;
    piece.tokens = guesses(piece).subspan(guess - 1, 1);
    recorder.current().copy(known ? known : model.draft.unknown(), model.draft.before().at(piece.first * h), h * 4);
    s.tokens.host<int32_t>()[piece.first] = piece.tokens.front();
    const int64_t position = sessions[static_cast<size_t>(piece.drafts)]->position() + static_cast<int64_t>(guess) - 1;
    for (const Angles& angles : s.angles)
      if (angles.unit == 1)
        rope_angles(angles.frequencies, angles.magnitude, position, 1,
                    angles.numbers.values<float>() + piece.first * angles.rope.dim, angles.unit);
  }
  for (const Angles& angles : s.angles)
    if (rows_ > 0) angles.numbers.upload(recorder.current(), rows_ * angles.rope.dim * 4);
  return rows_ > 0;
}

void DraftPass::run_layer(StepStats& stats) {
  const Model& model = engine_.model_;
  const LayerBlocks& layer = model.layers.back();
  Scratch& s = engine_.scratch_;
  Recorder& recorder = engine_.recorder_;
  recorder.look_around();
  Commands& commands = recorder.current();
  model.draft.begin(commands, s, model.embed, rows_);
  layer.input.read(commands, s, rows_);
  layer.mixer->record(commands, s, 0, {engine_.draft_pieces_, rows_});
  layer.input.add(commands, s, s.out, rows_);
  layer.feed_forward->run(recorder, engine_.experts_, s, rows_, stats);
  model.draft.end(recorder.current(), s, rows_);
}

// The likeliest token of each row.
void DraftPass::choose(StepStats& stats) {
  const Matrix& head = engine_.model_.head;
  const Scratch& s = engine_.scratch_;
  Recorder& recorder = engine_.recorder_;
  Commands& commands = recorder.current();
  const Mirrored ids = engine_.picks_.begin();
  const View values = ids.at(max_top_k).device;
  commands.matmul(std::array{project(s.normed, head, s.logits.device)}, rows_);
  for (int64_t row = 0; row < rows_; ++row)
    commands.top_k(s.logits.device.at(row * head.rows), head.rows, 1, ids.device.at(row), values.at(row));
  ids.download(commands, rows_ * 4);
  Ticket ticket = recorder.submit();
  engine_.experts_.let_go(recorder, stats);
  recorder.await(std::move(ticket));
}

}  // namespace moeflux
