#include <cstdlib>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "core/file.h"
#include "core/text.h"
#include "format/gguf.h"
#include "format/store_files.h"

namespace moeflux {
namespace {

constexpr size_t number_digits = 5;
constexpr std::string_view between = "-of-";
constexpr std::string_view suffix = ".gguf";
constexpr int64_t max_parts = 4096;  // each is a file that stays open

// What the name of a part says: NAME-00002-of-00003.gguf.
struct PartName {
  std::string stem;  // with its folder
  int64_t number = 0;
  int64_t count = 0;

  std::string of(int64_t part) const {
    const auto digits = [](int64_t value) {
      std::string text = std::to_string(value);
      return std::string(number_digits - std::min(number_digits, text.size()), '0') + text;
    };
    return concat(stem, "-", digits(part), between, digits(count), suffix);
  }
};

std::optional<PartName> part_name(const std::string& path) {
  constexpr size_t tail = 1 + number_digits + between.size() + number_digits + suffix.size();
  if (path.size() <= tail || !path.ends_with(suffix)) return std::nullopt;
  const std::string numbers = path.substr(path.size() - tail, tail - suffix.size());
  const std::string first = numbers.substr(1, number_digits);
  const std::string last = numbers.substr(numbers.size() - number_digits);
  const bool shaped = numbers[0] == '-' && numbers.substr(1 + number_digits, between.size()) == between &&
                      (first + last).find_first_not_of("0123456789") == std::string::npos;
  if (!shaped) return std::nullopt;
  return PartName{path.substr(0, path.size() - tail), std::atol(first.c_str()), std::atol(last.c_str())};
}

GgufHeader read_header(const std::string& path) {
  const File file(path);
  return parse_gguf_header([&](int64_t offset, std::span<std::byte> into) { file.read_exact(offset, into); },
                           file.bytes(), printable(path));
}

int64_t whole_value(const GgufHeader& header, const char* key, int64_t absent, std::string_view where) {
  const auto found = header.values.find(key);
  if (found == header.values.end()) return absent;
  int64_t number = 0;
  if (!found->second.whole(number))
    throw FormatError(concat(where, ": ", key, ": expected a whole number, found a value of another kind"));
  return number;
}

void expect(std::string_view where, std::string_view what, int64_t expected, int64_t found) {
  if (found != expected) throw FormatError(concat(where, ": ", what, ": expected ", expected, ", found ", found));
}

void add_tensors(Gguf& model, GgufHeader& header, std::string_view where) {
  const auto file = static_cast<int64_t>(model.files.size()) - 1;
  for (auto& [name, tensor] : header.tensors) {
    tensor.file = file;
    if (const auto before = model.tensors.find(name); before != model.tensors.end())
      throw FormatError(concat(where, ": tensor ", in_quotes(name), ": expected it once, found it in ",
                               printable(model.files[static_cast<size_t>(before->second.file)]), " too"));
    model.tensors.emplace(name, std::move(tensor));
  }
}

}  // namespace

Gguf read_gguf(const std::string& given) {
  const std::string path = absolute_path(given);
  GgufHeader header = read_header(path);
  const int64_t count = whole_value(header, "split.count", 1, printable(path));
  Gguf model;
  if (count <= 1) {
    model.files.push_back(path);
    model.header_bytes = header.bytes;
    add_tensors(model, header, printable(path));
    model.values = std::move(header.values);
    return model;
  }
  const std::optional<PartName> name = part_name(path);
  if (!name || name->count != count || count > max_parts)
    throw FormatError(concat(printable(path), ": split.count is ", count, ": expected a file that is named NAME-00001",
                             between, "... and so on, in up to ", max_parts, " parts, found another name"));
  int64_t tensors = 0;
  for (int64_t part = 0; part < count; ++part) {
    const std::string file = name->of(part + 1);
    const std::string where = printable(file);
    header = read_header(file);
    expect(where, "split.count", count, whole_value(header, "split.count", 0, where));
    expect(where, "split.no", part, whole_value(header, "split.no", -1, where));
    model.files.push_back(file);
    model.header_bytes += header.bytes;
    add_tensors(model, header, where);
    if (part == 0) model.values = header.values;
    const int64_t stated = whole_value(header, "split.tensors.count", -1, where);
    if (part == 0) tensors = stated;
    expect(where, "split.tensors.count", tensors, stated);
  }
  expect(printable(model.files.front()), "split.tensors.count", static_cast<int64_t>(model.tensors.size()), tensors);
  return model;
}

}  // namespace moeflux
