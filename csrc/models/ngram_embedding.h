// Rows of a table that a token and those before it choose by a hash, and how they enter the residual streams. The table
// is far larger than memory, so its rows are read as they are needed.
#pragma once

#include <string>
#include <vector>

#include "models/check.h"
#include "models/state_piece.h"
#include "models/tensor_list.h"

namespace moeflux {

constexpr int64_t max_ngram_length = 16;

struct NgramEmbedding {
  int64_t index = 0;     // among the layers that have one: each hashes in a way of its own
  int64_t width = 0;     // of a token's rows side by side
  int64_t length = 0;    // of the longest n-gram; the shortest has 2 tokens
  int64_t heads = 0;     // rows for each length
  int64_t min_rows = 0;  // each head has a part of the table, whose rows are a prime from this number on
  int64_t divisor = 1;   // of the rows of the whole table, some of which are never used
  int64_t seed = 0;      // of the hash
  int64_t end_id = -1;   // n-grams do not reach over this token, and see it before the first one
  int64_t parts = 1;     // tensors that the table is cut into
  int64_t taps = 0;      // of the convolution that follows, which takes every `length`-th row

  int64_t rows_per_token() const { return (length - 1) * heads; }
  int64_t row_width() const { return width / rows_per_token(); }
  int64_t kept_rows() const { return (taps - 1) * length; }  // of the convolution
  // The rows of each head's part, in order.
  std::vector<int64_t> head_rows() const;
  int64_t table_rows() const;
  std::string part_name(int64_t part) const;

  template <typename Self, typename Visit>
  static void each_field(Self& self, const Visit& visit) {
    visit("index", self.index);
    visit("width", self.width);
    visit("length", self.length);
    visit("heads", self.heads);
    visit("min_rows", self.min_rows);
    visit("divisor", self.divisor, int64_t{1});
    visit("seed", self.seed, int64_t{0});
    visit("end_id", self.end_id);
    visit("parts", self.parts, int64_t{1});
    visit("taps", self.taps);
  }
  void check(const Check& check) const;

  void add_tensors(TensorList& list, int64_t streams) const;
  StatePieces state(int64_t streams, int64_t hidden) const;

  bool operator==(const NgramEmbedding&) const = default;
};

// Which rows of the table a token has.
class NgramHash {
 public:
  NgramHash(const NgramEmbedding& shape, int64_t vocab);

  int64_t rows_per_token() const { return static_cast<int64_t>(rows_.size()); }
  int64_t length() const { return static_cast<int64_t>(multipliers_.size()); }
  // `tokens` end with the one whose rows are wanted; the text begins with them if they are fewer than `length`.
  void rows(const int32_t* tokens, int64_t count, int64_t* out) const;

 private:
  int32_t end_id_;
  std::vector<int64_t> multipliers_;  // of the token itself, of the one before, ...
  std::vector<int64_t> rows_;         // of each head's part
  std::vector<int64_t> first_;        // row of each part
};

}  // namespace moeflux
