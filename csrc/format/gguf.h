// The directory of a GGUF file, versions 2 and 3, little-endian.
//
//   "GGUF" | u32 version | u64 tensors | u64 values
//   values:  string key | u32 kind | value
//   tensors: string name | u32 dimensions | u64 size of each, the fastest first | u32 type | u64 offset in the data
//   the data begins at the next multiple of general.alignment (32 when nobody says); so does each tensor
// A string is a u64 length and its bytes. An array is a u32 kind, a u64 count, and so many values without their kinds.
//
// Checked: counts and lengths against the bytes that are there, strings are UTF-8, keys and names are unique, kinds and
// types are known, rows are whole blocks, and tensors lie within the file and share no byte. What is kept in memory is
// in proportion to the header, and that is at most gguf_max_header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/block_types.h"

namespace moeflux {

constexpr int64_t gguf_max_header = int64_t{128} << 20;
constexpr size_t gguf_max_values = size_t{4} << 20;  // keys, strings and arrays in arrays, and tensors
constexpr int gguf_max_depth = 4;                    // of arrays in arrays
constexpr uint64_t gguf_max_key = 65535;             // bytes
constexpr uint64_t gguf_max_name = 64;               // bytes of a tensor's name
constexpr uint32_t gguf_max_rank = 4;

enum class GgufKind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

// Bytes of a number of that kind; 0 for strings and arrays.
size_t gguf_kind_bytes(GgufKind kind);

struct GgufValue {
  GgufKind kind = GgufKind::u8;  // in an array, of its elements
  bool is_array = false;
  int64_t count = 1;
  std::vector<std::byte> numbers;  // as the file has them; booleans are 0 or 1
  std::vector<std::string> strings;
  std::vector<GgufValue> arrays;

  // The value if it is a single one of a kind that can hold it: all whole numbers of up to 63 bits. Null otherwise.
  const std::string* string() const;
  bool whole(int64_t& number) const;
};

// A type of tensors: so many numbers lie in so many bytes.
struct GgufType {
  std::string_view name;  // as others write it: "Q4_K"
  int64_t columns = 1;
  int64_t bytes = 0;
  BlockType block = BlockType::none;  // where it is one that kernels read
};

// Nothing for a number that stands for no type.
std::optional<GgufType> gguf_type(uint32_t number);

struct GgufTensor {
  GgufType type;
  std::vector<int64_t> shape;  // the slowest first
  int64_t file = 0;            // index into Gguf::files
  int64_t offset = 0;          // from the start of the file
  int64_t bytes = 0;
};

struct GgufHeader {
  uint32_t version = 0;
  int64_t bytes = 0;  // where the data starts, if there is any
  std::map<std::string, GgufValue> values;
  std::map<std::string, GgufTensor> tensors;
};

// `read` fills a span from a byte of the file on, which has `file_bytes`.
using GgufRead = std::function<void(int64_t offset, std::span<std::byte> into)>;
GgufHeader parse_gguf_header(const GgufRead& read, int64_t file_bytes, std::string_view where);

// A model in one file, or in parts that are named NAME-00001-of-00003.gguf and so on.
struct Gguf {
  std::vector<std::string> files;           // absolute paths, in the order of the parts
  int64_t header_bytes = 0;                 // of all files
  std::map<std::string, GgufValue> values;  // of the first part
  std::map<std::string, GgufTensor> tensors;
};

// `path` is that of the file, or of any part. FormatError where parts disagree.
Gguf read_gguf(const std::string& path);

}  // namespace moeflux
