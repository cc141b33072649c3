// Drafts: tokens that are likely to come next, evaluated in one call with the token before them. The session's position
// does not count them. When the next token is the first draft, it is the session's without any work, and its logits are
// there. When it is another one, the drafts are forgotten: rows beyond a position are never read, and of recurrent
// state there is a copy after each row but the last.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace moeflux {

// Drafts what follows the tokens `before` and `token`. Returns how many of `drafts` it has written.
using DraftSource = std::function<int64_t(std::span<const int32_t> before, int32_t token, std::span<int32_t> drafts)>;

// From the text itself: where its last tokens stood before, what followed them there. Of several such places it takes
// the one that has most tokens in common, and of these the last.
int64_t look_up(std::span<const int32_t> before, int32_t token, std::span<int32_t> drafts);

class Drafts {
 public:
  // Room for at most so many at once; 0: there are never any. `source` outlives it.
  Drafts(Backend& backend, const DraftSource& source, int64_t most, int64_t recurrent_bytes);
  // Bytes of the copies.
  static int64_t planned_bytes(int64_t most, int64_t recurrent_bytes);

  // ---- Of the call under way --------------------------------------------------------------------------------------

  // Drafts what follows `token` after the tokens `before`, at most `most`. Returns how many.
  int64_t propose(std::span<const int32_t> before, int32_t token, int64_t most);
  // As many as there may be, which are not known yet: `guesses` is the token and where they go. `believe` takes them.
  int64_t expect(int32_t token, int64_t most);
  std::span<int32_t> guesses() { return {guesses_.data(), static_cast<size_t>(1 + proposed_)}; }
  void believe();
  int64_t proposed() const { return proposed_; }
  // The token and its drafts: a row for each.
  std::span<const int32_t> rows() const { return {rows_.data(), static_cast<size_t>(1 + proposed_)}; }
  // Where the recurrent state after each row but the last goes; nothing where there is none.
  std::span<const View> copies();
  // The call has evaluated its rows, which now lie ahead of the session.
  void keep();

  // ---- Of the call before -----------------------------------------------------------------------------------------

  // One more than came true of the last ones; at first all that there is room for.
  int64_t longest() const { return longest_; }
  int64_t kept() const { return kept_; }
  int64_t ahead() const { return kept_ - taken_; }
  bool next_is(int32_t token) const { return ahead() > 0 && rows_[static_cast<size_t>(1 + taken_)] == token; }
  // The next one is the session's now.
  void take() { ++taken_; }
  // Which row of the call the session is at.
  int64_t row() const { return taken_; }
  // There are none any more. Returns the copy of the recurrent state where the session is, if that is not its state, to
  // change places with that.
  std::unique_ptr<Buffer>* forget();

 private:
  int64_t begin(int32_t token, int64_t most);

  const DraftSource& source_;
  std::vector<int32_t> rows_;                    // the token of the call, and its drafts
  std::vector<int32_t> guesses_;                 // likewise, by the layer that drafts
  std::vector<std::unique_ptr<Buffer>> copies_;  // one for each draft; none without recurrent state
  std::vector<View> views_;                      // of them
  int64_t longest_;
  int64_t proposed_ = 0;
  int64_t kept_ = 0;
  int64_t taken_ = 0;
};

}  // namespace moeflux
