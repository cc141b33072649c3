#include "core/text.h"

#include <cstdio>
#include <cstdlib>

#include "core/error.h"

namespace moeflux {
namespace {

template <typename... Values>
std::string formatted(const char* format, Values... values) {
  const locale_t before = uselocale(plain_locale());
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  uselocale(before);
  return text;
}

}  // namespace

locale_t plain_locale() {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", static_cast<locale_t>(nullptr));
  return plain;
}

std::string number_text(double value) { return formatted("%g", value); }

size_t utf8_sequence(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto continues = [&](size_t i) { return i < text.size() && (byte(i) & 0xc0) == 0x80; };
  if (at >= text.size()) return 0;
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4 || !continues(at + 1)) return 0;
  if (first < 0xe0) return 2;
  const unsigned second = byte(at + 1);
  // No overlong forms, no surrogates, nothing above U+10FFFF.
  if (first == 0xe0 && second < 0xa0) return 0;
  if (first == 0xed && second > 0x9f) return 0;
  if (first == 0xf0 && second < 0x90) return 0;
  if (first == 0xf4 && second > 0x8f) return 0;
  if (!continues(at + 2)) return 0;
  if (first < 0xf0) return 3;
  return continues(at + 3) ? 4 : 0;
}

std::string printable(std::string_view text, size_t limit) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (out.size() >= limit) return out + "...";
    const size_t length = utf8_sequence(text, at);
    const auto byte = static_cast<unsigned char>(text[at]);
    if (length == 0 || byte < 0x20 || byte == 0x7f) {
      out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
      ++at;
    } else {
      out += text.substr(at, length);
      at += length;
    }
  }
  return out;
}

std::string in_quotes(std::string_view text, size_t limit) { return '"' + printable(text, limit) + '"'; }

std::string sized(int64_t bytes) {
  const std::string exact = std::to_string(bytes) + " bytes";
  double size = static_cast<double>(bytes);
  for (const char* unit : {"kB", "MB", "GB"}) {
    size /= 1000;
    if (std::abs(size) >= 1000 && unit[0] != 'G') continue;
    return std::abs(bytes) < 1000 ? exact : exact + " (" + formatted("%.2f ", size) + unit + ")";
  }
  return exact;
}

}  // namespace moeflux
