#include "disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <string_view>

#include "moeflux.h"

namespace bench {

void drop_from_page_cache([[maybe_unused]] const std::string& store) {
#if defined(__linux__)
  for (const auto& entry : std::filesystem::recursive_directory_iterator(store)) {
    if (!entry.path().filename().string().starts_with("layer_")) continue;
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw moeflux::IoError(entry.path().string() + ": cannot be opened");
    (void)fsync(file);  // what is not written yet cannot be dropped
    (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
#endif
}

int64_t bytes_from_disk() {
  char text[1024];
  const int file = open("/proc/self/io", O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  const ssize_t length = read(file, text, sizeof text);
  close(file);
  const std::string_view all(text, length > 0 ? static_cast<size_t>(length) : 0);
  constexpr std::string_view name = "\nread_bytes: ";
  const size_t at = all.find(name);
  int64_t value = -1;
  if (at != all.npos) std::from_chars(all.data() + at + name.size(), all.data() + all.size(), value);
  return value;
}

}  // namespace bench
