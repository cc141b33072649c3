#include "engine/draft_policy.h"

#include <algorithm>

namespace moeflux {

double expected_tokens(const DraftChances& chances, int64_t drafts) {
  double tokens = 1;
  double chance = 1;
  for (int64_t i = 0; i < drafts; ++i) tokens += chance *= chances[static_cast<size_t>(i)];
  return tokens;
}

double estimated_seconds(const DraftSeconds& seconds, int64_t drafts) {
  const auto known = [&](int64_t k) { return seconds[static_cast<size_t>(k)].has_value(); };
  const auto at = [&](int64_t k) { return *seconds[static_cast<size_t>(k)]; };
  if (known(drafts)) return at(drafts);
  int64_t low = drafts;
  while (!known(low)) --low;
  int64_t high = drafts;
  while (high <= max_drafts && !known(high)) ++high;
  if (high > max_drafts) {
    high = low--;
    while (low >= 0 && !known(low)) --low;
    if (low < 0) return at(high);
  }
  const double slope = std::max(0.0, (at(high) - at(low)) / static_cast<double>(high - low));
  return at(low) + slope * static_cast<double>(drafts - low);
}

int64_t best_drafts(const DraftSeconds& seconds, const DraftChances& chances, int64_t least) {
  const auto rate = [&](int64_t k) { return expected_tokens(chances, k) / estimated_seconds(seconds, k); };
  int64_t best = least;
  for (int64_t k = least + 1; k <= max_drafts; ++k)
    if (rate(k) > rate(best)) best = k;
  return best;
}

}  // namespace moeflux
