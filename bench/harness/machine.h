// What the machine is and what this process has taken of it.
#pragma once

#include <cstdint>
#include <string>

namespace bench {

std::string cpu_name();
std::string compiler();  // "GCC 12.2.0"
int cores();
double load_average();  // of the last minute; below 0 when the system does not say

// The most memory this process has had, in bytes.
int64_t peak_rss_bytes();

// Processor time that this process has used so far, on all threads, in seconds.
double cpu_seconds();

// Calls of operator new in this process so far, on any thread.
int64_t allocations();

}  // namespace bench
