#include "engine/experts/chosen_reads.h"

#include <algorithm>

namespace moeflux {

ChosenReads chosen_reads(Reads asked, const ReadsFacts& facts) {
  if (asked == Reads::direct) return {ReadMode::direct, "asked for"};
  if (asked == Reads::buffered) return {ReadMode::buffered, "asked for"};
  if (!facts.direct_works) return {ReadMode::buffered, "this file system has no direct reads"};
  if (facts.streams)
    return facts.buffered_is_faster ? ChosenReads{ReadMode::buffered, "faster on this disk, says doctor"}
                                    : ChosenReads{ReadMode::direct, "not every expert has a slot"};
  if (facts.crowds_out)
    return {ReadMode::direct, "each expert is read once, and the page cache would take memory that others need"};
  return {ReadMode::buffered, "each expert is read once, and the next load finds it in the page cache"};
}

bool supports_direct(const StoreDirectory& store) {
  return std::ranges::all_of(store.expert_places, [&](const std::vector<ExpertPlace>& places) {
    return places.empty() || supports_direct(store.files[static_cast<size_t>(places.front().of(0).file)]);
  });
}

}  // namespace moeflux
