// Reads structs that list their fields (`each_field`) from JSON objects, and writes them as such.
//
// A field is visited by its name alone, or with its default, the value that it has when it is absent. A field with its
// default is not written. A std::variant is an object whose "kind" says which of its structs it is.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "format/json.h"

namespace moeflux {

template <typename T>
concept NamedEnum = std::is_enum_v<T> && requires { names_of(T{}); };

template <typename T>
concept Fielded = std::is_class_v<T> && requires(T& value) { T::each_field(value, [](auto&&...) {}); };

// ---- Reading --------------------------------------------------------------------------------------------------------

inline void read_value(bool& out, const Json& json, const std::string& where) {
  if (!json.boolean()) wrong_value(where, "true or false", &json);
  out = *json.boolean();
}

inline void read_value(int64_t& out, const Json& json, const std::string& where) {
  if (!json.integer()) wrong_value(where, "a whole number", &json);
  out = *json.integer();
}

inline void read_value(double& out, const Json& json, const std::string& where) {
  if (json.integer())
    out = static_cast<double>(*json.integer());
  else if (json.real())
    out = *json.real();
  else
    wrong_value(where, "a number", &json);
}

inline void read_value(std::string& out, const Json& json, const std::string& where) {
  if (!json.string()) wrong_value(where, "a string", &json);
  out = *json.string();
}

template <NamedEnum T>
void read_value(T& out, const Json& json, const std::string& where) {
  constexpr auto names = names_of(T{});
  std::string known;
  for (size_t i = 0; i < names.size(); ++i) {
    if (json.string() && *json.string() == names[i]) {
      out = static_cast<T>(i);
      return;
    }
    known += concat(i ? " or " : "", names[i]);
  }
  wrong_value(where, known, &json);
}

template <typename T>
void read_value(std::vector<T>& out, const Json& json, const std::string& where) {
  if (!json.array()) wrong_value(where, "an array", &json);
  for (size_t i = 0; i < json.array()->size(); ++i) {
    T item{};
    read_value(item, (*json.array())[i], concat(where, "[", i, "]"));
    out.push_back(std::move(item));
  }
}

// Checks that every required field is there with its own type, and that there are no others. `also` is a key that
// belongs to somebody else.
template <Fielded T>
void read_fields(T& out, const Json& json, const std::string& where, std::string_view also = {}) {
  if (!json.object()) wrong_value(where, "an object", &json);
  std::set<std::string_view> known = {also};
  T::each_field(out, [&](std::string_view name, auto& field, const auto&... absent) {
    known.insert(name);
    if (const Json* value = json.find(name))
      read_value(field, *value, concat(where, ".", name));
    else if constexpr (sizeof...(absent) == 1)
      ((field = absent), ...);
    else
      throw FormatError(concat(where, ": field ", in_quotes(name), " is missing"));
  });
  for (const JsonMember& member : *json.object())
    if (!known.contains(member.key)) throw FormatError(concat(where, ": unknown field ", in_quotes(member.key)));
}

template <Fielded T>
void read_value(T& out, const Json& json, const std::string& where) {
  read_fields(out, json, where);
}

template <typename T>
void read_value(std::optional<T>& out, const Json& json, const std::string& where) {
  read_value(out.emplace(), json, where);
}

template <Fielded... Kinds>
void read_value(std::variant<Kinds...>& out, const Json& json, const std::string& where) {
  if (!json.object()) wrong_value(where, "an object", &json);
  const Json* kind = json.find("kind");
  const bool found = kind && kind->string() && ((*kind->string() == Kinds::kind && (out = Kinds{}, true)) || ...);
  if (!found) {
    std::string known;
    ((known += concat(known.empty() ? "" : " or ", Kinds::kind)), ...);
    wrong_value(where + ".kind", known, kind);
  }
  std::visit([&](auto& value) { read_fields(value, json, where, "kind"); }, out);
}

// ---- Writing --------------------------------------------------------------------------------------------------------

template <typename T>
  requires std::is_constructible_v<Json::Value, const T&>
Json written(const T& value) {
  return Json(Json::Value(value));
}

template <NamedEnum T>
Json written(const T& value) {
  return Json(std::string(names_of(value)[static_cast<size_t>(value)]));
}

template <typename T>
  requires(!std::is_same_v<T, Json>)
Json written(const std::vector<T>& values) {
  Json::Array items;
  for (const T& value : values) items.push_back(written(value));
  return Json(std::move(items));
}

template <Fielded T>
Json written(const T& value) {
  Json::Object members;
  if constexpr (requires { T::kind; }) members.push_back({"kind", Json(std::string(T::kind))});
  T::each_field(value, [&]<typename Field>(std::string_view name, const Field& field, const auto&... absent) {
    if constexpr (sizeof...(absent) == 1)
      if (((field == Field(absent)) && ...)) return;
    if constexpr (requires { field.has_value(); })
      members.push_back({std::string(name), written(*field)});
    else
      members.push_back({std::string(name), written(field)});
  });
  return Json(std::move(members));
}

template <Fielded... Kinds>
Json written(const std::variant<Kinds...>& value) {
  return std::visit([](const auto& each) { return written(each); }, value);
}

}  // namespace moeflux
