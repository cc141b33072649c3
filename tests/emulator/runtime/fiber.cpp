#include "fiber.h"

#if !defined(__x86_64__)
#error "the emulator switches fibers on x86-64 only"
#endif

// What a function must preserve; everything else the caller of msl_switch has saved.
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch, @function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch, .-msl_switch
)");

namespace emulator {

void* new_stack(char* top, void (*main)()) {
  void** stack = reinterpret_cast<void**>(top);
  // A function expects its stack 8 bytes off a multiple of 16, as a call leaves it.
  *--stack = nullptr;
  *--stack = reinterpret_cast<void*>(main);
  for (int saved_register = 0; saved_register < 6; ++saved_register) *--stack = nullptr;
  return stack;
}

}  // namespace emulator
