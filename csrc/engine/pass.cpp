#include "engine/pass.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/stopwatch.h"
#include "engine/engine.h"
#include "engine/rope_angles.h"

namespace moeflux {
namespace {

// How many of so many layers are sent ahead.
int64_t layers_ahead(int64_t layers) { return std::min<int64_t>(4, layers / 4); }

bool wants_every(const Piece& piece) { return !piece.all_logits.empty(); }
bool wants_last(const Piece& piece) { return piece.logits && !wants_every(piece); }
// Its rows at the end whose logits are wanted, and the first of them.
int64_t wanted_rows(const Piece& piece) { return wants_last(piece) ? 1 + piece.drafts : 0; }
int64_t first_wanted(const Piece& piece) { return piece.first + piece.rows() - 1 - piece.drafts; }

}  // namespace

Pass::Pass(LoadedEngine& engine, const Interruption& waiting) : engine_(engine), turn_(engine.take_turn(waiting)) {
  engine_.pieces_.clear();
}

void Pass::add(const Piece& piece) {
  engine_.pieces_.push_back(piece);
  engine_.pieces_.back().first = rows_;
  rows_ += piece.rows();
}

void Pass::run(const Interruption& halfway, StepStats& stats) {
  const Stopwatch watch;
  engine_.recorder_.begin(stats, halfway);
  engine_.experts_.begin(rows_);
  try {
    engine_.ngrams_.begin(engine_.pieces_, stats);
    if (engine_.next_step_.is(engine_.pieces_) && engine_.experts_.runs_alone(rows_)) {
      run_recorded(stats);
    } else {
      engine_.next_step_.forget();
      write_tokens();
      run_layers(stats);
      run_logits(stats);
    }
    hand_on();
    run_draft_rows();
    engine_.recorder_.finish();
    engine_.experts_.finish(stats);
    engine_.ngrams_.finish();
    engine_.model_.weights.check_unchanged();
  } catch (...) {
    engine_.next_step_.forget();
    engine_.recorder_.abandon();
    engine_.experts_.abandon();
    engine_.ngrams_.abandon();
    throw;
  }
  engine_.count_tables();
  stats.tokens += rows_;
  const double seconds = watch.seconds();
  stats.seconds += seconds;
  stats.compute_seconds += seconds - stats.read_wait_seconds;
}

// Where the device looks for them.
void Pass::write_tokens() {
  const Variant& variant = engine_.model_.variant;
  if (!variant.begins()) return;
  const int64_t streams = variant.stream_count();
  auto* const tokens = engine_.scratch_.tokens.host<int32_t>();
  for (const Piece& piece : engine_.pieces_)
    for (int64_t i = 0; i < piece.rows(); ++i)
      std::fill_n(tokens + (piece.first + i) * streams, streams, piece.tokens[static_cast<size_t>(i)]);
}

// Leaves rows of the embedding, or those of the stage before, in scratch.hidden.
void Pass::begin_stream(const Rows& rows) {
  const Model& model = engine_.model_;
  const Variant& variant = model.variant;
  const Scratch& s = engine_.scratch_;
  Commands& commands = engine_.recorder_.current();
  if (!variant.begins()) {
    for (const Piece& piece : rows.pieces)
      std::ranges::copy(piece.hidden_in, s.exchanged.values<float>() + piece.first * variant.row_width());
    return s.exchanged.upload(commands, rows.n * variant.row_width() * 4);
  }
  commands.embed(model.embed, s.tokens, s.hidden, rows.n * variant.stream_count());
  if (variant.embedding_scale != 1)
    commands.scale(s.hidden, static_cast<float>(variant.embedding_scale), rows.n * variant.row_width());
}

// Leaves the normed rows of the model's last layer in scratch.normed, or those of another stage's last layer in
// scratch.exchanged, recorded and not yet submitted.
void Pass::run_layers(StepStats& stats) {
  const Model& model = engine_.model_;
  Scratch& s = engine_.scratch_;
  Recorder& recorder = engine_.recorder_;
  const Rows rows = {engine_.pieces_, rows_};
  for (const Angles& angles : s.angles) {
    for (const Piece& piece : rows.pieces) {
      const int64_t first = piece.position / angles.unit;
      const int64_t count = (piece.position + piece.rows()) / angles.unit - first;
      rope_angles(angles.frequencies, angles.magnitude, first, count,
                  angles.numbers.values<float>() + piece.first * angles.rope.dim, angles.unit);
    }
    angles.numbers.upload(recorder.current(), rows.n * angles.rope.dim * 4);
  }

  begin_stream(rows);
  for (size_t i = 0; i < static_cast<size_t>(model.variant.num_layers()); ++i) {
    recorder.look_around();
    const LayerBlocks& layer = model.layers[i];
    if (layer.ngram) {
      engine_.ngrams_.fetch(static_cast<int64_t>(i), layer.ngram->rows().values<float>(), stats);
      layer.ngram->record(recorder.current(), s, i, rows);
    }
    Commands& commands = recorder.current();
    layer.input.read(commands, s, rows.n);
    layer.mixer->record(commands, s, i, rows);
    layer.input.add(commands, s, s.out, rows.n);
    layer.feed_forward->run(recorder, engine_.experts_, s, rows.n, stats);
    if (static_cast<int64_t>(i) + 1 == layers_ahead(model.variant.num_layers())) send_ahead();
  }
  if (model.variant.ends())
    model.output.read(recorder.current(), s, rows.n);
  else
    s.exchanged.download(recorder.current(), rows.n * model.variant.row_width() * 4);
}

// What is recorded so far, so that the device is at work while the host records the rest, where nothing was submitted
// yet.
void Pass::send_ahead() {
  Recorder& recorder = engine_.recorder_;
  if (!engine_.backend_->runs_on_submit() || recorder.holds() || recorder.keeps_any()) return;
  recorder.current();
  recorder.send();
}

// Those of all rows come first, because this takes long and may be given up.
void Pass::run_logits(StepStats& stats) {
  const std::span<const Piece> pieces = engine_.pieces_;
  const bool any_last = std::ranges::any_of(pieces, wants_last);
  if (!any_last || std::ranges::any_of(pieces, wants_every)) await(stats);
  for (const Piece& piece : pieces)
    if (wants_every(piece)) every_logit(piece, stats);
  if (any_last) {
    record_every_last();
    await(stats);
  }
  const int64_t vocab = engine_.model_.head.rows;
  for (const Piece& piece : pieces) {
    if (!wants_every(piece) || !piece.logits) continue;
    std::memcpy(piece.logits.values<float>(), piece.all_logits.data() + (piece.rows() - 1) * vocab,
                static_cast<size_t>(vocab) * 4);
    piece.logits.upload(*engine_.backend_, vocab * 4);
  }
}

// As many at once as there is room for.
void Pass::record_every_last() {
  const std::span<const Piece> pieces = engine_.pieces_;
  for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
    int64_t count = 0;
    for (; end < pieces.size() && count + wanted_rows(pieces[end]) <= engine_.scratch_.logit_rows; ++end)
      count += wanted_rows(pieces[end]);
    if (count > 0) record_last_logits(pieces.subspan(begin, end - begin), count);
  }
}

// The rows of the last layer go to whoever has the next one.
void Pass::hand_on() {
  const Variant& variant = engine_.model_.variant;
  if (variant.ends()) return;
  engine_.recorder_.drain();  // where memory is shared, nothing follows the last layer, and the batch awaited was empty
  for (const Piece& piece : engine_.pieces_)
    std::copy_n(engine_.scratch_.exchanged.values<float>() + piece.first * variant.row_width(), piece.hidden_out.size(),
                piece.hidden_out.begin());
}

// The rows that the layer that drafts keeps of these tokens. Nobody waits for what else it would say.
void Pass::run_draft_rows() {
  const Model& model = engine_.model_;
  if (!model.variant.draft) return;
  const int64_t h = model.variant.hidden_size;
  Scratch& s = engine_.scratch_;
  Commands& commands = engine_.recorder_.current();
  engine_.draft_pieces_.clear();
  for (const Piece& piece : engine_.pieces_) {
    const View before = model.draft.before().at(piece.first * h);
    commands.copy(piece.draft.before ? piece.draft.before : model.draft.unknown(), before, h * 4);
    if (piece.rows() > 1) commands.copy(s.normed.at(piece.first * h), before.at(h), (piece.rows() - 1) * h * 4);
    const int64_t last = piece.first + piece.rows() - 1 - piece.drafts;
    commands.copy(s.normed.at(last * h), piece.draft.hidden, (1 + piece.drafts) * h * 4);
    const int64_t skipped = piece.draft.row < 0 ? 1 : 0;
    if (piece.rows() == skipped) continue;
    Piece& rows = engine_.draft_pieces_.emplace_back(piece);
    rows.tokens = piece.tokens.subspan(static_cast<size_t>(skipped));
    rows.state = piece.draft.state;
    rows.position = piece.draft.row + skipped;
    rows.first = piece.first + skipped;
  }
  if (!engine_.draft_pieces_.empty()) {
    const LayerBlocks& layer = model.layers.back();
    model.draft.begin(commands, s, model.embed, rows_);
    layer.input.read(commands, s, rows_);
    layer.mixer->keep(commands, s, 0, {engine_.draft_pieces_, rows_});
  }
  engine_.recorder_.send();
}

// ---- The step to come ----------------------------------------------------------------------------------------------

// Where nothing of a step depends on what the host has, but for its tokens.
bool Pass::may_record_next() {
  constexpr int64_t most_rows = 64;  // of more, each layer has a batch
  const Variant& variant = engine_.model_.variant;
  const auto is_plain = [](const Piece& piece) {
    return NextStep::is_plain(piece) && piece.copies.empty() && piece.state->has_room(piece.position + 1);
  };
  return engine_.backend_->records_ahead() && rows_ <= most_rows && variant.is_whole() && !variant.draft &&
         !engine_.ngrams_.has_tables() && std::ranges::all_of(engine_.pieces_, is_plain) &&
         engine_.experts_.runs_alone(rows_);
}

// While the device is at work. What fails here, fails again where it is wanted.
void Pass::record_next() noexcept {
  Recorder& recorder = engine_.recorder_;
  try {
    if (!may_record_next()) return;
    // The first batch brings the angles, which are written anew. Those of one row are few enough to be taken when it is
    // submitted. Those of more are copied later, and who does not know that they were, has to wait for that.
    if (rows_ > 1 && !recorder.in_flight()) return;
    recorder.reach_deferred();
    for (Piece& piece : engine_.pieces_) ++piece.position;  // nobody needs those of this step any more
    NextStep::Batches batches;
    StepStats counts;
    recorder.record_ahead(batches, [&] {
      run_layers(counts);
      record_every_last();
    });
    counts.beside_seconds = 0;  // they are a part of this step
    engine_.next_step_.become(engine_.pieces_, std::move(batches), counts);
  } catch (...) {
    engine_.next_step_.forget();
  }
}

void Pass::run_recorded(StepStats& stats) {
  Recorder& recorder = engine_.recorder_;
  write_tokens();
  recorder.look_around();
  NextStep::Batches batches = engine_.next_step_.take(stats);
  for (std::unique_ptr<Commands>& batch : batches) {
    recorder.take_up(std::move(batch));
    if (&batch != &batches.back()) recorder.send();
  }
  await(stats);
}

// ---- Logits --------------------------------------------------------------------------------------------------------

// Submits the batch at hand, and waits for the reads that it holds for and then for the batch.
void Pass::await(StepStats& stats) {
  Ticket ticket = engine_.recorder_.submit();
  engine_.experts_.let_go(engine_.recorder_, stats);
  record_next();
  engine_.recorder_.await(std::move(ticket));
}

// One product for the `count` rows at the ends of pieces whose logits are wanted. Each session has its logits in a
// buffer of its own. Those of one piece go there at once.
void Pass::record_last_logits(std::span<const Piece> pieces, int64_t count) {
  const View rows = side_by_side(pieces);
  const Piece& first = *std::ranges::find_if(pieces, wants_last);
  if (count == wanted_rows(first)) {
    record_logits(rows, count, first.logits.device);
    return bring_logits({&first, 1});
  }
  const int64_t vocab = engine_.model_.head.rows;
  Commands& commands = engine_.recorder_.current();
  Mirrored from = engine_.scratch_.logits;
  record_logits(rows, count, from.device);
  for (const Piece& piece : pieces) {
    if (!wants_last(piece)) continue;
    const int64_t numbers = wanted_rows(piece) * vocab;
    commands.copy(from.device, piece.logits.device, numbers * 4);
    from = from.at(numbers);
  }
  bring_logits(pieces);
}

// To the host: the logits, or what it asks of them instead.
void Pass::bring_logits(std::span<const Piece> pieces) {
  constexpr int64_t head = sizeof(ShortlistHead);
  const int64_t vocab = engine_.model_.head.rows;
  const ShortlistLayout layout(vocab);
  Commands& commands = engine_.recorder_.current();
  std::vector<ShortlistArgs> listed;
  for (const Piece& piece : pieces) {
    if (!wants_last(piece) || !piece.found) continue;
    for (int64_t row = 0; row < wanted_rows(piece); ++row) {
      const View logits = piece.logits.device.at(row * vocab);
      const View found = piece.found.device.at(row, head);
      if (piece.lists)
        listed.push_back({logits, found, piece.lists.device.at(row, layout.bytes()), piece.factor});
      else
        commands.survey(logits, vocab, found);
    }
  }
  if (!listed.empty()) commands.shortlist(listed, vocab);
  for (const Piece& piece : pieces) {
    if (!wants_last(piece)) continue;
    const int64_t rows = wanted_rows(piece);
    if (!piece.found) {
      piece.logits.download(commands, rows * vocab * 4);
      continue;
    }
    if (!piece.lists) {
      piece.found.download(commands, rows * head);
      continue;
    }
    const int64_t of_heads = piece.lists.device.offset - piece.found.device.offset;
    piece.found.download(commands, of_heads + layout.groups_at());
    for (int64_t row = 1; row < rows; ++row) piece.lists.at(row, layout.bytes()).download(commands, layout.groups_at());
  }
}

// The rows of the pieces whose logits are wanted. They are copied unless they are neighbours anyway.
View Pass::side_by_side(std::span<const Piece> pieces) {
  const int64_t h = engine_.model_.variant.hidden_size;
  const Scratch& s = engine_.scratch_;
  const int64_t first = first_wanted(*std::ranges::find_if(pieces, wants_last));
  int64_t next = first;
  bool are_neighbours = true;
  for (const Piece& piece : pieces) {
    if (!wants_last(piece)) continue;
    are_neighbours &= first_wanted(piece) == next;
    next += wanted_rows(piece);
  }
  if (are_neighbours) return s.normed.at(first * h);
  View to = s.out;
  for (const Piece& piece : pieces) {
    if (!wants_last(piece)) continue;
    const int64_t numbers = wanted_rows(piece) * h;
    engine_.recorder_.current().copy(s.normed.at(first_wanted(piece) * h), to, numbers * 4);
    to = to.at(numbers);
  }
  return s.out;
}

// Logits of all rows of a piece, some at a time.
void Pass::every_logit(const Piece& piece, StepStats& stats) {
  const Scratch& s = engine_.scratch_;
  const int64_t vocab = engine_.model_.head.rows;
  for (int64_t first = 0; first < piece.rows(); first += s.logit_rows) {
    engine_.recorder_.look_around();
    const int64_t count = std::min(s.logit_rows, piece.rows() - first);
    record_logits(s.normed.at((piece.first + first) * engine_.model_.variant.hidden_size), count, s.logits.device);
    s.logits.download(engine_.recorder_.current(), count * vocab * 4);
    await(stats);
    std::memcpy(piece.all_logits.data() + first * vocab, s.logits.values<float>(),
                static_cast<size_t>(count * vocab) * 4);
  }
}

// Of `count` normed rows.
void Pass::record_logits(View rows, int64_t count, View out) {
  const Matrix& head = engine_.model_.head;
  Commands& commands = engine_.recorder_.current();
  commands.matmul(std::array{Product{rows, engine_.model_.variant.hidden_size, head, out, head.rows}}, count);
  if (engine_.model_.variant.logit_cap > 0)
    commands.soft_cap(out, static_cast<float>(engine_.model_.variant.logit_cap), count * head.rows);
}

}  // namespace moeflux
