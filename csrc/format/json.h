// Strict JSON, read whole into memory.
//
// It follows RFC 8259 to the letter: no comments, no trailing commas, no text after the value, no byte-order mark,
// valid UTF-8, paired surrogate escapes. Besides, keys of an object are unique, and size, depth and number of values
// are limited. So no text makes the reader take more than a few hundred MiB besides the text itself. Every failure is a
// FormatError: "WHERE: line 3, column 14 (byte 120): expected ':' after a key, found '}'".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace moeflux {

constexpr int64_t json_max_bytes = int64_t{128} << 20;
constexpr int json_max_depth = 64;
constexpr size_t json_max_values = size_t{4} << 20;  // member names count as well
constexpr size_t json_max_number_length = 512;       // characters

struct JsonMember;

// One value. Whole numbers that fit int64 are integers, exactly; all other numbers are the nearest double, always
// finite.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<JsonMember>;  // in the order of the text
  using Value = std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object>;

  Json() = default;  // null
  explicit Json(Value value);

  // Null when the value is of another kind.
  const bool* boolean() const { return std::get_if<bool>(&value_); }
  const int64_t* integer() const { return std::get_if<int64_t>(&value_); }
  const double* real() const { return std::get_if<double>(&value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const Array* array() const { return std::get_if<Array>(&value_); }
  const Object* object() const { return std::get_if<Object>(&value_); }
  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }

  // The member of that name; null when there is none or the value is no object.
  const Json* find(std::string_view key) const;

  // For messages: "the number 3", "the string \"x\"", "an object".
  std::string describe() const;

 private:
  Value value_;
};

struct JsonMember {
  std::string key;
  Json value;
};

// Defined here because moving a Value needs JsonMember complete.
inline Json::Json(Value value) : value_(std::move(value)) {}

// `where` begins every message; usually the path of the file.
Json parse_json(std::string_view text, std::string_view where);

Json read_json(const std::string& path);

// Throws the FormatError "WHERE: expected EXPECTED, found <value>".
[[noreturn]] void wrong_value(std::string_view where, std::string_view expected, const Json* found);

}  // namespace moeflux
