#include "mutate.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace moeflux::fuzz {
namespace {

const char* const edge_numbers[] = {"0",
                                    "-1",
                                    "1",
                                    "2",
                                    "3",
                                    "63",
                                    "64",
                                    "65",
                                    "128",
                                    "4095",
                                    "4096",
                                    "1048576",
                                    "1048577",
                                    "2147483647",
                                    "2147483648",
                                    "4294967295",
                                    "4294967296",
                                    "9007199254740993",
                                    "4611686018427387904",
                                    "9223372036854775744",
                                    "9223372036854775807",
                                    "9223372036854775808",
                                    "-9223372036854775808",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "1.5",
                                    "1e3",
                                    "1e308",
                                    "1e309",
                                    "-0",
                                    "0.0",
                                    "00",
                                    "1e-400",
                                    "null",
                                    "\"1\"",
                                    "[]",
                                    "{}",
                                    "true"};

const uint64_t edge_words[] = {
    0,           1,          2,           7,       8,         0x7f,          0x80,       0xff,      0x7fffffff,
    0x80000000u, 0xffffffff, 0x100000000, 1 << 20, 100000000, (1 << 20) + 1, UINT64_MAX, INT64_MAX, 1ull << 63};

}  // namespace

Mutator::Mutator(uint64_t seed, std::vector<std::string> dictionary)
    : random_(seed), dictionary_(std::move(dictionary)) {}

size_t Mutator::below(size_t count) { return count ? static_cast<size_t>(random_() % count) : 0; }

std::string Mutator::mutate(std::string input, const std::string& other, size_t limit) {
  for (size_t changes = 1 + below(8); changes > 0; --changes) change(input, other);
  if (input.size() > limit) input.resize(limit);
  return input;
}

void Mutator::change(std::string& input, const std::string& other) {
  const size_t at = below(input.size() + 1);
  const size_t length = std::min(input.size() - at, 1 + below(below(4) ? 8 : 64));
  switch (below(11)) {
    case 0:
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
      break;
    case 1:
      if (at < input.size()) input[at] = static_cast<char>(random_());
      break;
    case 2:
      input.insert(at, 1, static_cast<char>(random_()));
      break;
    case 3:
      input.erase(at, length);
      break;
    case 4:
      input.insert(below(input.size() + 1), input.substr(at, length));
      break;
    case 5: {  // a piece of the other input, put in or over
      const size_t from = below(other.size() + 1);
      const std::string piece = other.substr(from, 1 + below(64));
      input.replace(at, below(2) ? std::min(piece.size(), input.size() - at) : 0, piece);
      break;
    }
    case 6:
    case 7:
      if (!dictionary_.empty()) {
        const std::string& word = dictionary_[below(dictionary_.size())];
        input.replace(at, below(2) ? std::min(word.size(), input.size() - at) : 0, word);
      }
      break;
    case 8:
      replace_digits(input);
      break;
    case 9:
      overwrite_word(input);
      break;
    case 10:
      input.resize(at);
      break;
  }
}

// A number of the text becomes another one.
void Mutator::replace_digits(std::string& input) {
  size_t begin = below(input.size() + 1);
  while (begin < input.size() && !std::isdigit(static_cast<unsigned char>(input[begin]))) ++begin;
  size_t end = begin;
  while (end < input.size() && std::isdigit(static_cast<unsigned char>(input[end]))) ++end;
  if (begin == end) return;
  input.replace(begin, end - begin, edge_numbers[below(std::size(edge_numbers))]);
}

// Four or eight bytes become a number that matters, the size of the input among them, or one close by.
void Mutator::overwrite_word(std::string& input) {
  const size_t width = below(2) ? 4 : 8;
  if (input.size() < width) return;
  const size_t at = below(4) ? below(input.size() / width) * width : below(input.size() - width + 1);
  uint64_t word = 0;
  switch (below(3)) {
    case 0:
      word = edge_words[below(std::size(edge_words))];
      break;
    case 1:
      word = input.size() - 8 + below(9) - 4;
      break;
    case 2:
      std::memcpy(&word, input.data() + at, width);
      word += below(17) - 8;
      break;
  }
  std::memcpy(input.data() + at, &word, width);
}

std::vector<std::string> read_dictionary(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": expected a dictionary");
  std::vector<std::string> words;
  for (std::string line; std::getline(file, line);) {
    const size_t begin = line.find('"'), end = line.rfind('"');
    if (line.empty() || line[0] == '#' || begin == end) continue;
    std::string word;
    for (size_t i = begin + 1; i < end; ++i) {
      if (line[i] == '\\' && line[i + 1] == 'x') {
        word += static_cast<char>(std::stoi(line.substr(i + 2, 2), nullptr, 16));
        i += 3;
      } else {
        if (line[i] == '\\') ++i;
        word += line[i];
      }
    }
    words.push_back(word);
  }
  return words;
}

}  // namespace moeflux::fuzz
