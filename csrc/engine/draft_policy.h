// How many tokens to draft, from what calls take and from how often drafts come true: functions of numbers alone.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

namespace moeflux {

constexpr int64_t max_drafts = 4;  // of a session, at once

// What a call takes with so many drafts for each of its sessions, in seconds; nothing where nobody knows.
using DraftSeconds = std::array<std::optional<double>, 1 + max_drafts>;
// How often each draft comes true where those before it have.
using DraftChances = std::array<double, max_drafts>;

// A session's tokens of a call: the one that was asked for, and the drafts that come true.
double expected_tokens(const DraftChances& chances, int64_t drafts);

// What nobody knows lies on the line between its neighbours. Behind the last that is known it goes on like that line,
// or is no more than the last. The first drafts cost most, so this makes too little of it, and whoever believes it will
// know better. Without drafts it must be known.
double estimated_seconds(const DraftSeconds& seconds, int64_t drafts);

// With how many, from `least` on, most tokens come a second; the fewer of equal ones.
int64_t best_drafts(const DraftSeconds& seconds, const DraftChances& chances, int64_t least);

}  // namespace moeflux
