#include "backends/backends.h"

#include <cstdlib>

#include "backend/cpu_backend.h"
#include "backend/deferred_backend.h"
#include "core/error.h"
#include "core/text.h"
#include "metal/make_device.h"
#include "metal/metal_backend.h"

namespace moeflux {

namespace {

// What "auto" is told to be; "auto" where nobody says.
std::string wanted_backend() {
  const char* forced = std::getenv("MOEFLUX_BACKEND");
  const std::string name = forced ? forced : "auto";
  if (name != "auto" && name != "cpu" && name != "metal")
    throw ArgumentError(concat("MOEFLUX_BACKEND: expected auto, cpu or metal, found ", in_quotes(name)));
  return name;
}

}  // namespace

std::string metal_failure() {
  if (wanted_backend() != "auto") return "";
  const std::string reason = metal::failure();
  return reason.empty() ? "" : concat("Metal does not work here, the CPU does the work: ", reason);
}

std::string chosen_backend(const std::string& name) {
  if (name == "auto") {
    const std::string wanted = wanted_backend();
    return wanted != "auto" ? wanted : metal::is_chosen() ? "metal" : "cpu";
  }
  if (name != "cpu" && name != "metal")
    throw ArgumentError(concat("backend: expected auto, cpu or metal, found ", in_quotes(name)));
  return name;
}

std::unique_ptr<Backend> make_backend(const std::string& name, const std::string& isa, bool exact, int threads,
                                      int64_t fail_at_op, bool deferred) {
  std::unique_ptr<Backend> backend;
  if (chosen_backend(name) == "metal")
    backend = std::make_unique<metal::MetalBackend>(metal::make_device(), metal::most_work(), fail_at_op);
  else
    backend = std::make_unique<CpuBackend>(isa, exact, threads, fail_at_op);
  if (deferred) backend = std::make_unique<DeferredBackend>(std::move(backend));
  return backend;
}

bool maps_files(const std::string& name) { return chosen_backend(name) == "metal"; }

int64_t prepared_bytes(const std::string& name, const WorkSizes& sizes) {
  return chosen_backend(name) == "metal" ? metal::MetalBackend::prepared_bytes(sizes)
                                         : CpuBackend::prepared_bytes(sizes);
}

}  // namespace moeflux
