// A stack of its own, and the switch to it and back.
#pragma once
#include <cstddef>

namespace emulator {

constexpr size_t stack_bytes = 64 * 1024;

// Saves the caller's registers and stack pointer, goes on where `to` was saved.
extern "C" void msl_switch(void** from, void* to);

// The stack pointer of a fiber that has not run yet: the first switch to it calls `main`, which must not return.
void* new_stack(char* top, void (*main)());

}  // namespace emulator
