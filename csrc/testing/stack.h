// Stacks of their own and the switch between them, under AddressSanitizer too.
//
// A `Context` is somewhere to continue: a stack pointer on x86-64, a ucontext elsewhere. `prepare` makes one that
// enters a function at the top of a fresh stack; `switch_context` leaves one for another. The sanitizer has to be told
// before and after each switch which stack it is on.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#if defined(__x86_64__) && !defined(KVPAGER_EMULATE_UCONTEXT)
#define KVPAGER_EMULATE_ASSEMBLY  // a switch of 15 instructions; ucontext, for other CPUs, makes a system call
#else
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

constexpr size_t kStackBytes = 64 << 10;

struct Context {
  const void* bottom = nullptr;  // of its stack; null until known for the stack of the caller of a launch
  size_t bytes = 0;
  void* fake_stack = nullptr;  // the sanitizer's
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
};

#if defined(KVPAGER_EMULATE_ASSEMBLY)
// Saves the callee-saved registers on the stack, stores the stack pointer, and continues on another stack.
extern "C" void kvpager_emulated_switch(void** save, void* resume);
asm(".text\n.weak kvpager_emulated_switch\n.type kvpager_emulated_switch,@function\nkvpager_emulated_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#endif

inline void switch_context(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.bytes);
#endif
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  kvpager_emulated_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.registers, &to.registers);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// The first thing a prepared context does; `came_from` is the launch's own, whose stack is learned here.
inline void entered(Context& came_from) {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (came_from.bottom == nullptr) came_from.bottom = bottom, came_from.bytes = bytes;
#else
  (void)came_from;
#endif
}

// Null if there is no memory.
inline void* map_stack() {
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return stack == MAP_FAILED ? nullptr : stack;
}

// `enter` never returns.
inline void prepare(Context& context, void* stack, void (*enter)()) {
  context.bottom = stack;
  context.bytes = kStackBytes;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, kStackBytes);  // who used it before left without returning
#endif
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + kStackBytes - 64);
  *--top = nullptr;  // return address of `enter`
  *--top = reinterpret_cast<void*>(enter);
  context.stack_pointer = top - 6;  // six registers, whatever they hold
#else
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = kStackBytes;
  makecontext(&context.registers, enter, 0);
#endif
}

}  // namespace emulated
