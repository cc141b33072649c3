// Values of some tokens, block by block: of those that were changed, of the few that are left, or of those in a
// bracket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/cpu/choice.h"

namespace moeflux {

// In the order of the tokens. Of each block whole vectors, which end with -inf for no token.
struct ListedValues {
  const double* values;
  const int32_t* tokens;
  size_t count;
  const double* worths = nullptr;
};

class ValueList {
 public:
  // Room for so many values, and for what each is worth where that is wanted. Memory is touched as far as there are
  // some.
  ValueList(int64_t room, int64_t vocab_size, bool worths = false);

  void clear() { size_ = 0; }
  // Is there room for so many values of one more block?
  bool has_room(int64_t count) const {
    return size_ + static_cast<size_t>(count + cpu::choice_lanes + cpu::spare_choice_places) <= room_;
  }
  // Blocks are written one after the other: so many values of the next, which the caller writes and passes to `end`.
  double* values() { return values_.get() + size_; }
  int32_t* tokens() { return tokens_.get() + size_; }
  void end(int64_t block, size_t count);

  // Of all values, by whoever knows what they are worth.
  double* worths() { return worths_.get(); }
  ListedValues all() const { return {values_.get(), tokens_.get(), size_, worths_.get()}; }
  ListedValues of(int64_t block) const {
    const size_t first = firsts_[static_cast<size_t>(block)];
    const size_t count = firsts_[static_cast<size_t>(block) + 1] - first;
    return {values_.get() + first, tokens_.get() + first, count, worths_ ? worths_.get() + first : nullptr};
  }

  int64_t bytes() const;

 private:
  size_t room_;
  size_t size_ = 0;
  std::vector<size_t> firsts_;  // of each block, then the size
  std::unique_ptr<double[]> values_;
  std::unique_ptr<int32_t[]> tokens_;
  std::unique_ptr<double[]> worths_;
};

}  // namespace moeflux
