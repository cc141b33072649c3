#include "core/free_memory.h"

#include <unistd.h>

#include <fstream>
#include <string>

namespace moeflux {

int64_t free_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string name; info >> name;) {
    int64_t kilobytes = 0;
    if (name == "MemAvailable:" && info >> kilobytes) return kilobytes * 1024;
    info.ignore(256, '\n');
  }
  return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE) / 2;
}

}  // namespace moeflux
