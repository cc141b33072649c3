#include "gpu/kernel_text.h"

#include <algorithm>
#include <cstdlib>

#include "core/error.h"
#include "core/file.h"

namespace moeflux::gpu {
namespace {

constexpr int64_t max_bytes = int64_t{1} << 20;  // of one file

// The name in a line `#include "name"`, or nothing.
std::string included(const std::string& line) {
  const std::string start = "#include \"";
  if (line.rfind(start, 0) != 0) return {};
  return line.substr(start.size(), line.find('"', start.size()) - start.size());
}

}  // namespace

std::string KernelTexts::file_text(const std::string& file) const {
  for (const EmbeddedFile& each : gpu_files())
    if (each.name == file) return std::string(each.text);
  if (const char* own = std::getenv(folder)) return File(concat(own, "/", file)).read_text(max_bytes);
  for (const EmbeddedFile& each : embedded)
    if (each.name == file) return std::string(each.text);
  throw DeviceError(concat("kernels: expected a file ", file, ", found none"));
}

void KernelTexts::add(const std::string& file, std::set<std::string>& seen, std::string& text) const {
  if (!seen.insert(file).second) return;
  const std::string lines = file_text(file);
  text += concat("#line 1 \"", file, "\"\n");
  int number = 0;
  for (size_t at = 0; at < lines.size();) {
    const size_t end = std::min(lines.find('\n', at), lines.size());
    const std::string line = lines.substr(at, end - at);
    at = end + 1;
    ++number;
    const std::string other = included(line);
    if (!other.empty()) {
      add(other, seen, text);
      text += concat("#line ", number + 1, " \"", file, "\"\n");
    } else if (line == "#pragma once") {
      text += "\n";
    } else {
      text += line + "\n";
    }
  }
}

std::vector<std::string> KernelTexts::names() const {
  std::vector<std::string> names;
  for (const EmbeddedFile& file : embedded)
    if (file.name.ends_with(ending)) names.emplace_back(file.name.substr(0, file.name.size() - ending.size()));
  return names;
}

std::string KernelTexts::text(const std::string& name) const {
  std::set<std::string> seen;
  std::string text;
  add(name + std::string(ending), seen, text);
  return text;
}

}  // namespace moeflux::gpu
