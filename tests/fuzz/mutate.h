// Makes inputs out of inputs: bytes, pieces, words of a dictionary, and numbers replaced by ones that break arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace moeflux::fuzz {

class Mutator {
 public:
  Mutator(uint64_t seed, std::vector<std::string> dictionary);

  // One to eight changes of `input`; `other` is a second input to take pieces from. At most `limit` bytes come back.
  std::string mutate(std::string input, const std::string& other, size_t limit);

  // 0 ... count - 1; 0 for a count of 0.
  size_t below(size_t count);

 private:
  void change(std::string& input, const std::string& other);
  void replace_digits(std::string& input);
  void overwrite_word(std::string& input);

  std::mt19937_64 random_;
  std::vector<std::string> dictionary_;
};

// The words of a dictionary file as libFuzzer reads it: a line "word" each, with \xNN, \\ and \" inside, # comments.
std::vector<std::string> read_dictionary(const std::string& path);

}  // namespace moeflux::fuzz
