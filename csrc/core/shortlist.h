// What a device finds in logits for whoever draws a token from them, so that they need not come to the host: the
// greatest of them, and what each block of them weighs.
//
// Which logits are listed does not depend on how a token is drawn. They are sorted into classes by how far they are
// below the greatest, and whole classes are listed, the nearest first, as far as there is room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>

namespace moeflux {

constexpr int64_t shortlist_block = 2048;
constexpr int64_t shortlist_group = 32;  // of logits side by side; what to list is decided by the greatest of each
constexpr int64_t most_listed = 2048;
constexpr int64_t most_listed_groups = 1024;  // that have a logit on the list

struct ShortlistHead {
  int32_t likeliest = 0;
  int32_t odd = -1;   // the first that is not finite
  int32_t count = 0;  // of those listed
  int32_t nothing = 0;
};
struct ShortlistBlock {
  double sum;      // of 2^((logit - greatest) * factor)
  float greatest;  // of this block
  int32_t odd;
};

// Where the parts lie, in bytes, for so many logits. The first three are for the host.
struct ShortlistLayout {
  explicit ShortlistLayout(int64_t logits)
      : blocks((logits + shortlist_block - 1) / shortlist_block),
        groups((logits + shortlist_group - 1) / shortlist_group),
        room((std::min(logits, most_listed) + 3) / 4 * 4) {}

  int64_t blocks;
  int64_t groups;
  int64_t room;

  int64_t tokens_at() const { return blocks * int64_t{sizeof(ShortlistBlock)}; }  // i32, ascending
  int64_t logits_at() const { return tokens_at() + room * 4; }                    // f32, of these
  int64_t groups_at() const { return logits_at() + room * 4; }                    // f32, the greatest of each
  int64_t bytes() const { return (groups_at() + groups * 4 + 15) / 16 * 16; }
};

struct Shortlist {
  double factor;  // by which the blocks were weighed
  int64_t vocab_size;
  std::span<const ShortlistBlock> blocks;
  std::span<const int32_t> tokens;
  std::span<const float> logits;
  // The logits of a block, which it brings to the host.
  const std::function<std::span<const float>(int64_t block)>& read_block;

  // Whether all logits are listed.
  bool is_whole() const { return static_cast<int64_t>(tokens.size()) == vocab_size; }
};

}  // namespace moeflux
