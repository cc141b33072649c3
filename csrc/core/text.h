// Text from outside: is it UTF-8, and how is it shown in a message. Numbers as text.
#pragma once

#include <locale.h>
#if defined(__APPLE__)
#include <xlocale.h>
#endif

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace moeflux {

// How numbers are written in files and messages, whatever the process's locale is. It lives as long as the process.
locale_t plain_locale();

// Bytes of the well-formed UTF-8 sequence at `text[at]`, 1 to 4; 0 when there is none.
size_t utf8_sequence(std::string_view text, size_t at);

// `text` for a message: always valid UTF-8 on one line, control characters and stray bytes as \xNN, cut after `limit`
// bytes.
std::string printable(std::string_view text, size_t limit = 300);

// "text", printable and in quotes.
std::string in_quotes(std::string_view text, size_t limit = 300);

// A number of bytes for a message, exact and at a glance: "1234567 bytes (1.23 MB)". Units are powers of 1000.
std::string sized(int64_t bytes);

}  // namespace moeflux
