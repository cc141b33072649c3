// JSON written back as text, and compared: for checking that reading loses nothing.
#pragma once

#include <cstdio>
#include <string>

#include "format/json.h"

namespace moeflux::fuzz {

inline void write_string(const std::string& value, std::string& out) {
  out += '"';
  for (char c : value) {
    char escaped[8];
    if (static_cast<unsigned char>(c) < 0x20 || c == '"' || c == '\\') {
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
}

inline void write_json(const Json& value, std::string& out) {
  if (const bool* boolean = value.boolean()) {
    out += *boolean ? "true" : "false";
  } else if (const int64_t* integer = value.integer()) {
    out += std::to_string(*integer);
  } else if (const double* real = value.real()) {
    char text[40];
    std::snprintf(text, sizeof text, "%.17e", *real);  // the exponent keeps it from being read as an integer
    out += text;
  } else if (const std::string* string = value.string()) {
    write_string(*string, out);
  } else if (const Json::Array* array = value.array()) {
    out += '[';
    for (size_t i = 0; i < array->size(); ++i) {
      if (i) out += ',';
      write_json((*array)[i], out);
    }
    out += ']';
  } else if (const Json::Object* object = value.object()) {
    out += '{';
    for (size_t i = 0; i < object->size(); ++i) {
      if (i) out += ',';
      write_string((*object)[i].key, out);
      out += ':';
      write_json((*object)[i].value, out);
    }
    out += '}';
  } else {
    out += "null";
  }
}

inline std::string json_text(const Json& value) {
  std::string out;
  write_json(value, out);
  return out;
}

inline bool same_json(const Json& a, const Json& b) {
  if (a.boolean() && b.boolean()) return *a.boolean() == *b.boolean();
  if (a.integer() && b.integer()) return *a.integer() == *b.integer();
  if (a.real() && b.real()) return *a.real() == *b.real();
  if (a.string() && b.string()) return *a.string() == *b.string();
  if (a.array() && b.array()) {
    if (a.array()->size() != b.array()->size()) return false;
    for (size_t i = 0; i < a.array()->size(); ++i)
      if (!same_json((*a.array())[i], (*b.array())[i])) return false;
    return true;
  }
  if (a.object() && b.object()) {
    if (a.object()->size() != b.object()->size()) return false;
    for (size_t i = 0; i < a.object()->size(); ++i) {
      const JsonMember &left = (*a.object())[i], &right = (*b.object())[i];
      if (left.key != right.key || !same_json(left.value, right.value)) return false;
    }
    return true;
  }
  return a.is_null() && b.is_null();
}

}  // namespace moeflux::fuzz
