#include "engine/expert_groups.h"

#include <algorithm>

namespace moeflux {

ExpertGroups::ExpertGroups(int64_t experts, int64_t most_pairs)
    : ends_(static_cast<size_t>(experts) + 1),
      pairs_(static_cast<size_t>(most_pairs)),
      groups_(static_cast<size_t>(experts)) {}

int64_t ExpertGroups::table_bytes(int64_t experts, int64_t most_pairs) {
  return (experts + 1 + most_pairs) * 4 + experts * static_cast<int64_t>(sizeof(Group));
}

int64_t ExpertGroups::tables() const {
  return static_cast<int64_t>((ends_.capacity() + pairs_.capacity()) * 4 + groups_.capacity() * sizeof(Group));
}

void ExpertGroups::assign(std::span<const int32_t> ids) {
  std::fill(ends_.begin(), ends_.end(), 0);
  for (const int32_t id : ids) ++ends_[static_cast<size_t>(id) + 1];
  for (size_t expert = 1; expert < ends_.size(); ++expert) ends_[expert] += ends_[expert - 1];
  // ends_[e] is where expert e begins; placing its pairs moves it to where it ends.
  for (size_t pair = 0; pair < ids.size(); ++pair)
    pairs_[static_cast<size_t>(ends_[static_cast<size_t>(ids[pair])]++)] = static_cast<int32_t>(pair);
  size_ = 0;
  int32_t begin = 0;
  for (size_t expert = 0; expert + 1 < ends_.size(); ++expert) {
    const int32_t end = ends_[expert];
    if (end > begin) groups_[size_++] = {static_cast<int32_t>(expert), pairs_.data() + begin, end - begin};
    begin = end;
  }
}

}  // namespace moeflux
