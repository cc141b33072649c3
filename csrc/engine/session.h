// One timeline of tokens: state, position, checkpoints, and who may use it now.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoints.h"
#include "engine/draft_memory.h"
#include "engine/drafts.h"
#include "engine/engine.h"
#include "engine/layer_state.h"
#include "engine/piece.h"
#include "moeflux.h"

namespace moeflux {

class EngineSession final : public Session {
 public:
  EngineSession(std::shared_ptr<LoadedEngine> engine, const SessionOptions& options);

  int64_t position() const override { return position_.load(std::memory_order_relaxed); }
  int64_t max_context() const override { return options_.max_context; }
  LayerRange layers() const override { return engine_->layers(); }
  std::vector<int32_t> tokens() const override;
  Evaluated prefill(std::span<const int32_t> tokens, const Progress& progress, std::span<float> all_logits,
                    const Interruption& interruption) override;
  Evaluated step(int32_t token, const Interruption& interruption, std::optional<int64_t> serial) override;
  bool foresees(int32_t token) const override;
  int64_t logits_serial() const override { return logits_serial_.load(std::memory_order_relaxed); }
  std::span<const float> logits() const override;
  void read_logits(const LogitsReader& read) const override;
  int32_t argmax() const override;
  std::optional<int32_t> likeliest(int64_t vocab_size) const override;
  bool read_shortlist(int64_t vocab_size, double factor, const ShortlistReader& read) const override;
  void top_k(std::span<int32_t> ids, std::span<float> values) const override;
  void clear() override;
  std::unique_ptr<Session> fork(std::optional<int64_t> position) override;
  void checkpoint() override;
  std::vector<int64_t> checkpoints() const override;
  int64_t exact_from() const override;
  void set_max_checkpoints(int64_t count) override;
  int64_t rewind(int64_t position, bool exact) override;
  void make_room(int64_t tokens) override;
  void read_state(const StateVisitor& show) override;
  void restore(int64_t position, std::span<const int32_t> tokens, const StateVisitor& fill) override;
  StepStats last() const override;
  StepStats total() const override;

  // ---- The parts of a call that evaluates, for this session alone or, by a Batch, together with others --------------

  bool is_of(const LoadedEngine& engine) const { return engine_.get() == &engine; }
  // Keeps others away until `leave`. StateError when somebody else does.
  void enter() const;
  void leave() const { busy_.store(false, std::memory_order_release); }
  // Whether the work is a token that a call before has evaluated: then there is only `commit` to do. Otherwise what was
  // foreseen is dropped.
  bool begin_foreseen(const Work& work);
  bool is_foreseen() const { return call_.foreseen; }
  // Whether this may be evaluated now.
  void check(const Work& work) const;
  // Takes room for the rows of so many tokens more. `drop_room` gives back what is not used, after an error too.
  void take_room(size_t tokens);
  void drop_room() noexcept;
  // Drafts what may follow the work, at most `most` tokens, and takes room for them. Returns how many there are.
  int64_t draft(const Work& work, int64_t most);
  // If the model's own layer is to say which: the token that was asked for and where its guesses go, and the rows of
  // the session that it takes. Then it has said them.
  std::span<int32_t> guesses() { return drafts_.guesses(); }
  DraftPiece draft_piece() { return draft_memory_->enter(position(), position() + drafts_.proposed(), true); }
  void take_guesses();
  // Prepares the way back. With `copies`, it may take a copy of the recurrent state.
  void begin(bool copies);
  bool can_go_back() const { return call_.can_go_back; }
  // The next `rows` of the work's tokens and drafts, for a pass. The logits are those of the last token of all, and of
  // the drafts. `given`: the tokens, and those that the next calls will bring, if they are known already.
  Piece next(const Work& work, int64_t rows, std::span<const int32_t> given = {});
  int64_t begun() const { return call_.begun; }  // rows that a pass has had
  int64_t rows_left(const Work& work) const;     // that none has had
  int64_t drafted() const { return call_.drafted; }
  void end_pass() { call_.has_logits |= call_.yields_logits; }
  // Goes back after an error, or without one when the call was given up. If it cannot, the session is unusable.
  void take_back(const std::exception* cause) noexcept;
  bool is_usable() const { return !unusable_; }
  std::string why_unusable() const { return why_.empty() ? "a call failed half-way" : why_; }
  // Error when the logits that are wanted are not finite; then the session is unusable.
  void check_result(const Work& work);
  // From now on the tokens of the call are the session's.
  void commit(const Work& work) noexcept;
  void count(const StepStats& call, int64_t tokens);

 private:
  // Holds the session for one call.
  class Use;

  // What a pass leaves in place of logits.
  struct Surveyed {
    bool any = false;   // the likeliest token, at least
    double factor = 0;  // and a shortlist, weighed by it; 0: none
  };

  // An evaluation under way.
  struct Call {
    const Buffer* copy = nullptr;  // of the recurrent state before it
    bool can_go_back = false;
    bool foreseen = false;
    int64_t drafted = 0;
    int64_t begun = 0;           // rows that a pass has had
    bool yields_logits = false;  // the last of these passes does
    bool has_logits = false;     // an earlier one did
    Surveyed was_surveyed;       // what surveyed_ was before
  };

  // A position that the session can be brought to, and the recurrent state there, if a checkpoint has it.
  struct Place {
    int64_t position;
    const Buffer* recurrent;
  };

  Footprint footprint_of(const SessionOptions& options) const;
  int64_t host_bytes_of(const SessionOptions& options) const;
  void check_usable() const;
  void check_whole(const char* call) const;
  void check_logits() const;
  void check_finite(const char* what, std::span<const float> numbers, size_t width);
  bool yields_logits(const Work& work) const;
  void drop_logits();
  void break_off(const char* what, const std::exception* cause = nullptr) noexcept;
  void check_tokens(std::span<const int32_t> tokens) const;
  class Room;
  void evaluate(const Work& work, std::span<const int32_t> given, const Interruption& interruption, StepStats& stats);
  const Buffer* recurrent_copy(bool make);
  void go_back(const Buffer* copy) noexcept;
  void settle() noexcept;
  std::span<const int32_t> rows_of(const Work& work) const;
  Place place_before(const char* call, int64_t target, bool exact);
  template <typename Change>
  void change_state(const char* what, const Change& change);
  void add_tokens(std::span<const int32_t> tokens) noexcept;
  std::string asked() const;
  Mirrored logits_of(int64_t row) const;
  std::span<const float> read_row(int64_t row) const;
  std::span<const float> read_part(int64_t row, int64_t first, int64_t end) const;
  void want(const Surveyed& wanted) const;
  const ShortlistHead& head_of(int64_t row) const;
  Mirrored list_of(int64_t row) const;

  std::shared_ptr<LoadedEngine> engine_;
  SessionOptions options_;
  SessionMemory::Share share_;
  SessionState state_;
  Drafts drafts_;
  std::optional<DraftMemory> draft_memory_;  // where the model has a layer for them
  MirroredBuffer logits_;                    // [1 + drafts, vocab] of the last call, valid when has_logits_
  std::optional<MirroredBuffer> found_;      // surveys and shortlists of them, where the host has no logits itself
  int64_t logits_row_ = 0;                   // of the last token
  Surveyed surveyed_;                        // what the last pass left
  mutable int64_t row_here_ = -1;            // then the one of the logits that the host has after all; -1: none
  mutable Surveyed wanted_ = {true};         // what those who had the last logits did with
  mutable bool was_asked_ = false;           // for that, since the last pass
  bool has_logits_ = false;
  std::atomic<int64_t> logits_serial_ = 0;
  std::atomic<int64_t> position_ = 0;
  std::unique_ptr<Buffer> token_room_;  // i32 [max_context]
  int64_t known_tokens_ = 0;            // in it: position, or 0 when they are not known
  bool unusable_ = false;               // a failure left the state in pieces
  std::string why_;                     // it did, when there was memory to say so
  Checkpoints checkpoints_;
  Places places_;  // to go back to: this one, and the checkpoints
  Call call_;
  StepStats last_;
  StepStats total_;
  mutable std::atomic<bool> busy_ = false;
};

class EngineSession::Use {
 public:
  explicit Use(const EngineSession& session) : session_(session) { session_.enter(); }
  ~Use() { session_.leave(); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  const EngineSession& session_;
};

}  // namespace moeflux
