#include "models/ngram_embedding.h"

#include <algorithm>
#include <limits>

#include "core/rounding.h"

namespace moeflux {
namespace {

bool is_prime(int64_t number) {
  if (number < 4) return number > 1;
  if (number % 2 == 0) return false;
  for (int64_t divisor = 3; divisor * divisor <= number; divisor += 2)
    if (number % divisor == 0) return false;
  return true;
}

// SplitMix64's step from a state to a number.
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Odd, and so small that no product with a token overflows.
int64_t multiplier(const NgramEmbedding& shape, int64_t vocab, int64_t distance) {
  const int64_t largest = std::numeric_limits<int64_t>::max() / std::max<int64_t>(vocab, 1);
  const auto bound = static_cast<uint64_t>(std::max<int64_t>(1, largest / 2));
  const uint64_t base = static_cast<uint64_t>(shape.seed) + 10007u * static_cast<uint64_t>(shape.index);
  const uint64_t state = base + 0x9e3779b97f4a7c15u * static_cast<uint64_t>(distance + 1);
  return static_cast<int64_t>(2 * (mixed(state) % bound) + 1);
}

}  // namespace

// The tables of the layers before have taken the primes before these.
std::vector<int64_t> NgramEmbedding::head_rows() const {
  std::vector<int64_t> rows;
  int64_t prime = min_rows - 1;
  for (int64_t head = 0; head < (index + 1) * rows_per_token(); ++head) {
    do ++prime;
    while (!is_prime(prime));
    if (head >= index * rows_per_token()) rows.push_back(prime);
  }
  return rows;
}

int64_t NgramEmbedding::table_rows() const {
  int64_t rows = 0;
  for (const int64_t of_head : head_rows()) rows += of_head;
  return round_up(rows, divisor);
}

std::string NgramEmbedding::part_name(int64_t part) const {
  return concat("ple.ple_embedding.ngram_embedding.shard_", part, ".weight");
}

void NgramEmbedding::check(const Check& check) const {
  check.limits({{"ngram.index", index, 0, 63},
                {"ngram.width", width, 1, max_width},
                {"ngram.length", length, 2, max_ngram_length},
                {"ngram.heads", heads, 1, 64},
                {"ngram.min_rows", min_rows, 2, int64_t{1} << 28},
                {"ngram.divisor", divisor, 1, max_width},
                {"ngram.seed", seed, 0, int64_t{1} << 31},
                {"ngram.end_id", end_id, 0, max_vocab},
                {"ngram.parts", parts, 1, 1 << 16},
                {"ngram.taps", taps, 2, 16}});
  check.whole_groups("ngram.width", width);
  check.require(width % rows_per_token() == 0, "ngram.width", concat("a multiple of ", rows_per_token(), " rows"),
                width);
  check.require(table_rows() % parts == 0, "ngram.parts", concat("a divisor of ", table_rows(), " rows"), parts);
}

void NgramEmbedding::add_tensors(TensorList& list, int64_t streams) const {
  const int64_t all = streams * list.hidden();
  list.matrix("ple.key_proj", all, width);
  list.matrix("ple.value_proj", list.hidden(), width);
  for (const char* name : {"ple.norm_key.weight", "ple.norm_query.weight", "ple.norm_conv.weight"})
    list.vector(name, all);
  list.conv("ple.conv1d.weight", all, taps);
  const int64_t rows = table_rows() / parts;
  for (int64_t part = 0; part < parts; ++part) list.table(part_name(part), rows, row_width());
}

StatePieces NgramEmbedding::state(int64_t streams, int64_t hidden) const {
  return {{"ngram_conv", false, {kept_rows(), streams * hidden}}};
}

// ---- NgramHash ------------------------------------------------------------------------------------------------------

NgramHash::NgramHash(const NgramEmbedding& shape, int64_t vocab)
    : end_id_(static_cast<int32_t>(shape.end_id)), rows_(shape.head_rows()) {
  for (int64_t distance = 0; distance < shape.length; ++distance)
    multipliers_.push_back(multiplier(shape, vocab, distance));
  int64_t first = 0;
  for (const int64_t rows : rows_) {
    first_.push_back(first);
    first += rows;
  }
}

void NgramHash::rows(const int32_t* tokens, int64_t count, int64_t* out) const {
  const int64_t heads = rows_per_token() / (length() - 1);
  int64_t hash = tokens[count - 1] * multipliers_[0];
  bool ended = false;
  for (int64_t distance = 1, head = 0; distance < length(); ++distance) {
    ended = ended || distance >= count || tokens[count - 1 - distance] == end_id_;
    hash ^= (ended ? end_id_ : tokens[count - 1 - distance]) * multipliers_[static_cast<size_t>(distance)];
    for (const int64_t last = head + heads; head < last; ++head) {
      const auto at = static_cast<size_t>(head);
      out[head] = first_[at] + hash % rows_[at];
    }
  }
}

}  // namespace moeflux
