// What devices find in logits, for a test device whose memory is apart: simple rather than fast.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "backend/cpu_commands.h"
#include "core/shortlist.h"

namespace moeflux {

// The limit of the classes whose logits are listed, by the greatest of the groups: at most so many of these.
static uint32_t shortlist_limit(std::span<const uint32_t> classes, int64_t most) {
  constexpr uint32_t all = 0x7fff;
  if (static_cast<int64_t>(classes.size()) <= most) return all;
  std::vector<uint32_t> sorted(classes.begin(), classes.end());
  std::ranges::nth_element(sorted, sorted.begin() + most);
  return sorted[static_cast<size_t>(most)];
}

void CpuCommands::survey(View logits, int64_t count, View found) {
  op("survey", [&] {
    const std::span<const float> all(logits.f32(), static_cast<size_t>(count));
    const auto comes_before = [](float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); };
    size_t best = 0;
    for (size_t i = 1; i < all.size(); ++i)
      if (comes_before(all[i], all[best])) best = i;
    const auto odd = std::ranges::find_if(all, [](float x) { return !std::isfinite(x); });
    found.i32()[0] = static_cast<int32_t>(best);
    found.i32()[1] = odd == all.end() ? -1 : static_cast<int32_t>(odd - all.begin());
  });
}

void CpuCommands::shortlist(std::span<const ShortlistArgs> rows, int64_t count) {
  for (const ShortlistArgs& row : rows) survey(row.logits, count, row.head);
  op("shortlist", [&] {
    const ShortlistLayout layout(count);
    for (const ShortlistArgs& row : rows) {
      const std::span<const float> logits(row.logits.f32(), static_cast<size_t>(count));
      auto& head = *reinterpret_cast<ShortlistHead*>(row.head.i32());
      auto* const blocks = reinterpret_cast<ShortlistBlock*>(row.list.i32());
      int32_t* const tokens = row.list.i32() + layout.tokens_at() / 4;
      float* const listed = row.list.f32() + layout.logits_at() / 4;
      const float greatest = logits[static_cast<size_t>(head.likeliest)];
      const auto class_of = [&](float logit) { return std::bit_cast<uint32_t>(greatest - logit) >> 16 & 0x7fff; };
      const auto part = [&](int64_t index, int64_t size) {
        return logits.subspan(static_cast<size_t>(index * size),
                              static_cast<size_t>(std::min(size, count - index * size)));
      };
      for (int64_t i = 0; i < layout.blocks; ++i) {
        const std::span<const float> block = part(i, shortlist_block);
        blocks[i] = {0, *std::ranges::max_element(block), -1};
        for (const float logit : block)
          blocks[i].sum += std::exp2((double{logit} - double{blocks[i].greatest}) * row.factor);
      }
      std::vector<uint32_t> classes;
      for (int64_t i = 0; i < layout.groups; ++i)
        classes.push_back(class_of(*std::ranges::max_element(part(i, shortlist_group))));
      head.count = head.nothing = 0;
      for (int64_t most = most_listed_groups; most > 0; most /= 2) {
        const uint32_t limit = shortlist_limit(classes, most);
        const auto is_listed = [&](float logit) { return class_of(logit) < limit; };
        if (std::ranges::count_if(logits, is_listed) > most_listed) continue;
        for (int64_t i = 0; i < count; ++i) {
          const float logit = logits[static_cast<size_t>(i)];
          if (!is_listed(logit)) continue;
          tokens[head.count] = static_cast<int32_t>(i);
          listed[head.count++] = logit;
        }
        break;
      }
    }
  });
}

}  // namespace moeflux
