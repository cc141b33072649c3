// The disk under a store: what the system keeps of it in memory, and what this process took from it.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

// The system forgets what it has of the layer files of a packed store. Nothing to do where it cannot be asked to.
void drop_from_page_cache(const std::string& store);

// Read from disks for this process so far, as the system counts; below 0 where it does not. Allocates nothing.
int64_t bytes_from_disk();

}  // namespace bench
