// Arguments of the kernels that take a few words from one memory to the other, as params.h has those of all others.
#pragma once

#include "sizes.h"

namespace moeflux::cuda {

constexpr uint32_t most_given_words = 512;  // that come as arguments, of which a launch may have 4 KB

// `count` words of four bytes.
struct WordsParams {
  const uint32_t* from;
  uint32_t* to;
  uint32_t count;
};

// The same, which come as arguments.
struct GivenWordsParams {
  uint32_t* to;
  uint32_t count;
  uint32_t words[most_given_words];
};

}  // namespace moeflux::cuda
