// Which tokens go through which expert: the router's choice for n tokens, turned over by counting sort.
//
// A pair is token * k + place in the router's order. Pairs of one expert stand together, in ascending order, and
// experts ascend. Holds room for the largest n it was made for, so that grouping allocates nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moeflux {

class ExpertGroups {
 public:
  struct Group {
    int32_t expert;
    const int32_t* pairs;  // into this object; valid until the next `assign`
    int64_t count;
  };

  ExpertGroups(int64_t experts, int64_t most_pairs);

  // Bytes: what it will take, and has.
  static int64_t table_bytes(int64_t experts, int64_t most_pairs);
  int64_t tables() const;

  // ids [n * k] as the router gave them, each below the number of experts.
  void assign(std::span<const int32_t> ids);

  std::span<const Group> groups() const { return {groups_.data(), size_}; }

 private:
  std::vector<int32_t> ends_;   // [experts + 1]
  std::vector<int32_t> pairs_;  // [most_pairs]
  std::vector<Group> groups_;   // [experts]
  size_t size_ = 0;
};

}  // namespace moeflux
