#include "core/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/arena.h"
#include "core/error.h"
#include "core/text.h"

namespace moeflux {

Mapping::Mapping(const File& file, int64_t begin, int64_t bytes) : bytes_(arena_bytes(bytes)) {
  // A process that touches a page after the end of a file is killed.
  if (file.bytes() - begin < bytes)
    throw IoError(concat(printable(file.path()), ": expected ", bytes, " bytes at byte ", begin, ", found ",
                         file.bytes() - begin, " before the end of the file"));
  const auto length = static_cast<size_t>(bytes_);
  void* const start = mmap(nullptr, length, PROT_READ, MAP_SHARED, file.descriptor(), static_cast<off_t>(begin));
  if (start == MAP_FAILED) throw IoError(concat(printable(file.path()), ": cannot be mapped: ", std::strerror(errno)));
  data_ = static_cast<std::byte*>(start);
  (void)madvise(start, length, MADV_WILLNEED);  // a wish
}

Mapping::~Mapping() { munmap(data_, static_cast<size_t>(bytes_)); }

}  // namespace moeflux
