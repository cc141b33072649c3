// A request that a decoder holds: how far it is, and what is to be told of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoder/decoder.h"

namespace moeflux {

struct Decoder::Running {
  Running(int64_t number, Request asked);

  // ---- What comes next --------------------------------------------------------------------------------------------

  bool reads() const { return read < request.tokens.size(); }
  bool can_choose() const { return !over && !reads() && !next && (!request.masked || mask); }
  bool has_told_token() const { return !events.empty() && events.back().token; }
  // The token that was chosen is evaluated already, and another may be chosen in the same step.
  bool is_foreseen() const;
  // At most `rows` tokens to evaluate now: of the prompt, to the next border, or the one that was chosen.
  std::span<const int32_t> tokens(int64_t rows) const;

  // ---- What happens -----------------------------------------------------------------------------------------------

  // The session has taken in so many tokens.
  void evaluated(const Work& work);
  void choose();
  void fail(const std::string& error);
  // There is something to tell: with what is to be told already, or in an event of its own.
  DecoderEvent& tell();
  DecoderEvent& tell_more();
  // Error unless the session is as the last step left it.
  void check_session() const;

  const int64_t id;
  const Request request;
  size_t read = 0;              // tokens of the prompt
  std::optional<int32_t> next;  // was chosen, and is not evaluated yet
  int64_t position;             // of the session
  int64_t serial;               // of its logits
  int64_t chosen = 0;           // tokens of the answer
  std::optional<std::vector<uint32_t>> mask;
  uint64_t served = 0;  // greater than that of those who have waited longer
  bool over = false;
  std::vector<DecoderEvent> events;  // not told yet
  std::unique_ptr<Running> behind;   // another one that is over, where this is

  // What others hand over, guarded by the decoder's mutex until the next step.
  std::optional<std::vector<uint32_t>> new_mask;
  bool removed = false;
};

}  // namespace moeflux
