// The backends there are, by name. Where the engine gets one without naming it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backend/backend.h"

namespace moeflux {

// "cpu" or "metal"; "auto" is what the environment variable MOEFLUX_BACKEND says, else the best one that works here.
// ArgumentError naming those there are when it is none of them.
std::string chosen_backend(const std::string& name);

// Why "auto" is not Metal on a machine whose GPU it should be; empty when it is, or when there is no such GPU. Told
// once by whoever talks to the user.
std::string metal_failure();

// By a chosen name. `isa`, `exact` and `threads` are for the CPU: empty and 0 choose, and with `exact` every product,
// and attention, is one of f32 numbers. DeviceError when it is not to be had.
//
// For tests: the op of number `fail_at_op`, counted from 0 over all batches, fails with DeviceError; with `deferred`,
// ops run on another thread some time after their batch was submitted.
std::unique_ptr<Backend> make_backend(const std::string& name, const std::string& isa, bool exact, int threads,
                                      int64_t fail_at_op = -1, bool deferred = false);

// Whether weights are used where their file lies in memory (Backend::map), known before there is a backend.
bool maps_files(const std::string& name);

// What `prepare` takes, known before there is a backend.
int64_t prepared_bytes(const std::string& name, const WorkSizes& sizes);

}  // namespace moeflux
