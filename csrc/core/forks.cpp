#include "core/forks.h"

#include <pthread.h>

#include <atomic>

namespace moeflux {
namespace {

std::atomic<int64_t> count{0};

[[maybe_unused]] const bool counting =
    pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); }) == 0;

}  // namespace

int64_t forks() { return count.load(std::memory_order_relaxed); }

}  // namespace moeflux
