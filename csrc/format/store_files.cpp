#include "format/store_files.h"

#include <dirent.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>

#include "core/error.h"
#include "core/file.h"
#include "core/text.h"

namespace fs = std::filesystem;

namespace moeflux {

std::string absolute_path(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  if (error) throw IoError(concat(printable(path), ": ", error.message()));
  return absolute.lexically_normal().string();
}

std::string required_file(const std::string& folder, const std::string& name) {
  const std::string path = (fs::path(folder) / name).string();
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type == fs::file_type::not_found) throw FormatError(concat(printable(path), ": expected this file, found none"));
  if (type == fs::file_type::none) throw IoError(concat(printable(path), ": ", error.message()));
  if (type != fs::file_type::regular)
    throw FormatError(concat(printable(path), ": expected a regular file, found something else"));
  return path;
}

void require_folder(const std::string& folder) {
  std::error_code error;
  const fs::file_type type = fs::status(folder, error).type();
  if (type == fs::file_type::none) throw IoError(concat(printable(folder), ": ", error.message()));
  if (type != fs::file_type::directory)
    throw FormatError(concat(printable(folder), ": expected a folder, found ",
                             type == fs::file_type::not_found ? "nothing" : "a file"));
}

// Not by std::filesystem: GCC's iterator ends the process when there is no memory for a name.
std::vector<std::string> names_in(const std::string& folder) {
  struct Close {
    void operator()(DIR* open) const { ::closedir(open); }
  };
  const std::unique_ptr<DIR, Close> open(::opendir(folder.c_str()));
  if (!open) throw IoError(concat(printable(folder), ": ", reason(errno)));
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(open.get());
    if (!entry && errno != 0) throw IoError(concat(printable(folder), ": ", reason(errno)));
    if (!entry) return names;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
}

}  // namespace moeflux
