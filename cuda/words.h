// Arguments of the kernels that copy words, as params.h has those of all others.
#pragma once

#include "sizes.h"

namespace moeflux::cuda {

constexpr uint32_t most_given_words = 512;  // that come as arguments, of which a launch may have 4 KB
constexpr uint32_t copied_words = 2048;     // that a block copies

// `count` words of four bytes from each of some places.
struct WordsPlaces {
  const uint32_t* from;
  uint32_t* to;
};
struct WordsParams {
  WordsPlaces places;
  const WordsPlaces* list;  // if there are several; else null
  uint32_t count;
};

// The same, which come as arguments.
struct GivenWordsParams {
  uint32_t* to;
  uint32_t count;
  uint32_t words[most_given_words];
};

}  // namespace moeflux::cuda
