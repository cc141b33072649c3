#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/sha256.h"

namespace moeflux::cuda {
namespace {

constexpr int64_t max_file_bytes = int64_t{64} << 20;
constexpr std::string_view first_line = "moeflux cubin 1";

std::string sum_of(std::string_view text) {
  Sha256 sum;
  sum.add(std::as_bytes(std::span(text)));
  return hex(sum.sum());
}

// As python/moeflux/machine/remembered.py has it. Empty when there is no home folder.
std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (const std::string own = variable("MOEFLUX_CACHE"); !own.empty()) return own;
  if (const std::string all = variable("XDG_CACHE_HOME"); all.starts_with('/')) return all + "/moeflux";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/moeflux";
}

std::string path_of(const std::string& folder, const CubinKey& key) {
  const std::string all = concat(sum_of(key.text), "\n", key.architecture, "\n", key.options);
  return concat(folder, "/", sum_of(all).substr(0, 32), ".cubin");
}

// With its parents.
bool make_folder(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) return true;
  const size_t end = path.rfind('/');
  if (errno != ENOENT || end == std::string::npos || end == 0) return false;
  return make_folder(path.substr(0, end)) && (mkdir(path.c_str(), 0755) == 0 || errno == EEXIST);
}

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

// Takes the first line from `text`.
std::string_view take_line(std::string_view& text) {
  const size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

}  // namespace

std::optional<std::string> cached_cubin(const CubinKey& key, const std::string& compiler) {
  const std::string folder = cache_folder();
  if (folder.empty()) return std::nullopt;
  try {
    const std::string all = File(path_of(folder + "/cuda", key)).read_text(max_file_bytes);
    std::string_view rest = all;
    if (take_line(rest) != first_line) return std::nullopt;
    const std::string_view maker = take_line(rest);
    if (!compiler.empty() && maker != compiler) return std::nullopt;
    const std::string_view sum = take_line(rest);
    if (rest.empty() || sum != sum_of(rest)) return std::nullopt;
    return std::string(rest);
  } catch (const Error&) {
    return std::nullopt;
  }
}

void cache_cubin(const CubinKey& key, const std::string& compiler, const std::string& cubin) {
  const std::string folder = cache_folder();
  if (folder.empty() || !make_folder(folder + "/cuda")) return;
  const std::string path = path_of(folder + "/cuda", key);
  // Whoever writes at the same time has a file of its own, and whoever reads sees all of one or of the other.
  std::string unfinished = path + ".XXXXXX";
  const int descriptor = mkstemp(unfinished.data());
  if (descriptor < 0) return;
  const bool written = write_all(descriptor, concat(first_line, "\n", compiler, "\n", sum_of(cubin), "\n")) &&
                       write_all(descriptor, cubin);
  const bool closed = close(descriptor) == 0;
  if (!written || !closed || rename(unfinished.c_str(), path.c_str()) != 0) unlink(unfinished.c_str());
}

}  // namespace moeflux::cuda
