// A small CUDA on the CPU, for tests: runs a kernel's own source with a host compiler (C++20, header only).
//
// Each CUDA thread is a fiber with a stack of its own; the blocks of a grid run one after the other on the calling
// thread. A warp shuffle or __syncthreads parks a fiber until those it waits for have come. What it finds that a GPU
// hides:
//  * KVPAGER_EMULATE_SEED=n picks the next runnable fiber at random (0, the default: in turn), so that a missing
//    barrier shows: run several seeds;
//  * shared memory is 0xFF bytes (NaN) at the start of every block;
//  * a barrier or shuffle that can never complete aborts with a report instead of hanging;
//  * KVPAGER_EMULATE_SKIP_BARRIER=k lets every thread run through its k-th block barrier (from 1): a planted fault, by
//    which a test proves that it would notice a missing one.
// Not covered: races whose every order at barrier granularity agrees, alignment, speed, tensor cores, async copies.
// Rules: shared variables are declared with KVPAGER_SHARED and of trivial types, and collectives are called by all
// living lanes of a warp.
#pragma once
#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#if defined(__x86_64__) && !defined(KVPAGER_EMULATE_UCONTEXT)
#define KVPAGER_EMULATE_ASSEMBLY  // a switch of 15 instructions; ucontext, for other CPUs, makes a system call
#else
#include <ucontext.h>
#endif

#define __global__ inline
#define __device__ inline
#define __forceinline__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kWarp = 32;

struct Fiber {
  dim3 thread_index;
  int lane = 0, warp = 0;
  unsigned barriers = 0;     // block barriers met so far
  unsigned collectives = 0;  // warp collectives met so far; its parity picks the exchange buffer
  char* stack = nullptr;
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

struct Warp {
  uint32_t alive = 0, ready = 0;  // lanes that have not returned; those of them that may run
  uint32_t at_collective = 0, at_barrier = 0;
  // Two buffers: a lane can be one collective ahead of its peers, not two. And who took part in each.
  uint64_t exchange[2][kWarp] = {};
  uint32_t taking_part[2] = {};
};

// One block in flight, and the scheduler's state. Fibers and stacks are reused from block to block.
struct Block {
  dim3 block_index, block_size, grid_size;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int alive = 0, waiting = 0;  // fibers that have not returned; those of them at the block barrier
  bool barrier_vote = false, barrier_result = false;
  uint32_t random = 0;  // 0: run in turn
  unsigned skip_barrier = 0;
  Fiber* running = nullptr;
  const std::function<void()>* body = nullptr;
  uint64_t serial = 0;  // counts the blocks run on this OS thread
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  void* scheduler_stack_pointer = nullptr;
#else
  ucontext_t scheduler_context;
#endif
  ~Block() {
    for (Fiber& fiber : fibers)
      if (fiber.stack) munmap(fiber.stack, kStackBytes);
  }
};

inline thread_local Block* block = nullptr;

#if defined(KVPAGER_EMULATE_ASSEMBLY)
// Saves the callee-saved registers on the stack, stores the stack pointer, and continues on another stack.
extern "C" void kvpager_emulated_switch(void** save, void* resume);
asm(".text\n.weak kvpager_emulated_switch\n.type kvpager_emulated_switch,@function\nkvpager_emulated_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#endif

// Continue `to`, or the scheduler if null.
inline void switch_to(Fiber* to) {
  Fiber* from = block->running;
  block->running = to;
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  kvpager_emulated_switch(from ? &from->stack_pointer : &block->scheduler_stack_pointer,
                          to ? to->stack_pointer : block->scheduler_stack_pointer);
#else
  swapcontext(from ? &from->context : &block->scheduler_context, to ? &to->context : &block->scheduler_context);
#endif
}

[[noreturn]] inline void die(const char* reason) {
  fprintf(stderr, "emulated GPU: %s in block (%u, %u, %u); %d threads alive, %d at the block barrier\n", reason,
          block->block_index.x, block->block_index.y, block->block_index.z, block->alive, block->waiting);
  for (size_t i = 0; i < block->warps.size(); ++i)
    fprintf(stderr, "  warp %zu: alive %08x, in a shuffle %08x, at the barrier %08x\n", i, block->warps[i].alive,
            block->warps[i].at_collective, block->warps[i].at_barrier);
  abort();
}

// The next fiber that may run: after the running one in turn, or after a random one.
inline Fiber* next_ready() {
  const int count = static_cast<int>(block->fibers.size());
  int start = static_cast<int>(block->running - block->fibers.data()) + 1;
  if (block->random) {
    block->random = block->random * 1664525u + 1013904223u;
    start = static_cast<int>((block->random >> 8) % static_cast<unsigned>(count));
  }
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = block->fibers[(start + i) % count];
    if (block->warps[fiber.warp].ready >> fiber.lane & 1) return &fiber;
  }
  return nullptr;
}

inline void yield() {
  Fiber* to = next_ready();
  if (!to && block->alive) die("deadlock: a barrier or shuffle that not all threads reach");
  if (to != block->running) switch_to(to);
}

inline void release_barrier() {
  for (Warp& warp : block->warps) {
    warp.ready |= warp.at_barrier;
    warp.at_barrier = 0;
  }
  block->waiting = 0;
  block->barrier_result = block->barrier_vote;
  block->barrier_vote = false;
}

inline void release_warp(Warp& warp) {
  const Fiber& one = block->fibers[(&warp - block->warps.data()) * kWarp + std::countr_zero(warp.at_collective)];
  warp.taking_part[(one.collectives - 1) & 1] = warp.at_collective;
  warp.ready |= warp.at_collective;
  warp.at_collective = 0;
}

inline void run_fiber() {
  (*block->body)();
  Warp& warp = block->warps[block->running->warp];
  const uint32_t bit = 1u << block->running->lane;
  warp.ready &= ~bit;
  warp.alive &= ~bit;
  --block->alive;
  // A return may complete what the others wait for.
  if (block->alive && block->waiting == block->alive) release_barrier();
  if (warp.at_collective && warp.at_collective == warp.alive) release_warp(warp);
  yield();
  abort();  // a finished fiber is never resumed
}

inline bool block_barrier(bool vote) {
  Fiber* self = block->running;
  if (++self->barriers == block->skip_barrier) return vote;
  block->barrier_vote |= vote;
  if (++block->waiting == block->alive) {
    release_barrier();
  } else {
    Warp& warp = block->warps[self->warp];
    warp.at_barrier |= 1u << self->lane;
    warp.ready &= ~(1u << self->lane);
    yield();
  }
  return block->barrier_result;  // stable: nobody passes the next barrier before all have read this one
}

// Publishes `mine` to the warp, waits for its living lanes, and returns what lane `source` published.
template <class T>
T exchange(T mine, int source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Fiber* self = block->running;
  Warp& warp = block->warps[self->warp];
  const unsigned parity = self->collectives++ & 1;
  uint64_t* buffer = warp.exchange[parity];
  memcpy(&buffer[self->lane], &mine, sizeof mine);
  warp.at_collective |= 1u << self->lane;
  if (warp.at_collective == warp.alive) {
    release_warp(warp);
    if (block->random) yield();
  } else {
    warp.ready &= ~(1u << self->lane);
    yield();
  }
  if (!(warp.taking_part[parity] >> source & 1)) die("a shuffle from a lane that has returned");
  T theirs;
  memcpy(&theirs, &buffer[source], sizeof theirs);
  return theirs;
}

// Fills a shared variable with NaN when the first thread of a block comes to its declaration.
inline void poison(void* data, size_t bytes, uint64_t& poisoned_in) {
  if (poisoned_in == block->serial) return;
  memset(data, 0xFF, bytes);
  poisoned_in = block->serial;
}

inline void start_fiber(Fiber& fiber) {
  if (!fiber.stack) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) die("no memory for a fiber's stack");
    fiber.stack = static_cast<char*>(stack);
  }
#if defined(KVPAGER_EMULATE_ASSEMBLY)
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
  *--top = nullptr;  // return address of run_fiber, which never returns
  *--top = reinterpret_cast<void*>(&run_fiber);
  fiber.stack_pointer = top - 6;  // six registers, whatever they hold
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.context, run_fiber, 0);
#endif
}

inline void run_block(const std::function<void()>& body) {
  const unsigned threads = block->block_size.x * block->block_size.y * block->block_size.z;
  if (threads % kWarp) die("a block size that is no multiple of 32");
  block->fibers.resize(threads);
  block->warps.assign(threads / kWarp, Warp());
  block->alive = static_cast<int>(threads);
  block->waiting = 0;
  block->barrier_vote = false;
  block->body = &body;
  ++block->serial;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = block->fibers[i];
    const dim3& size = block->block_size;
    fiber.thread_index = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
    fiber.lane = static_cast<int>(i % kWarp);
    fiber.warp = static_cast<int>(i / kWarp);
    fiber.barriers = fiber.collectives = 0;
    start_fiber(fiber);
    block->warps[fiber.warp].alive |= 1u << fiber.lane;
    block->warps[fiber.warp].ready |= 1u << fiber.lane;
  }
  block->running = nullptr;
  switch_to(&block->fibers[0]);
}

inline unsigned setting(const char* name) {
  const char* text = getenv(name);
  return text ? static_cast<unsigned>(strtoul(text, nullptr, 10)) : 0;
}

inline void launch(dim3 grid, dim3 block_size, const std::function<void()>& body) {
  static thread_local Block state;
  block = &state;
  state.grid_size = grid;
  state.block_size = block_size;
  state.skip_barrier = setting("KVPAGER_EMULATE_SKIP_BARRIER");
  const unsigned seed = setting("KVPAGER_EMULATE_SEED");
  state.random = seed ? seed * 2654435761u | 1u : 0;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        state.block_index = dim3(x, y, z);
        run_block(body);
      }
}

}  // namespace emulated

#define threadIdx (emulated::block->running->thread_index)
#define blockIdx (emulated::block->block_index)
#define blockDim (emulated::block->block_size)
#define gridDim (emulated::block->grid_size)
#define KVPAGER_SHARED(type, name)        \
  static thread_local type name;          \
  static thread_local uint64_t name##_in; \
  emulated::poison(&name, sizeof name, name##_in)
#define KVPAGER_LAUNCH(kernel, grid, block, stream, ...) \
  ((void)(stream), emulated::launch(grid, block, [&] { kernel(__VA_ARGS__); }))

inline void __syncthreads() { emulated::block_barrier(false); }
inline int __syncthreads_or(int vote) { return emulated::block_barrier(vote != 0); }

template <class T>
T __shfl_xor_sync(uint32_t mask, T mine, int lane_mask) {
  if (mask != 0xffffffffu) emulated::die("a shuffle over part of a warp");
  return emulated::exchange(mine, emulated::block->running->lane ^ lane_mask);
}

inline unsigned atomicOr(unsigned* address, unsigned bits) {
  const unsigned old = *address;
  *address |= bits;
  return old;
}

inline unsigned atomicExch(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address = value;
  return old;
}

using std::exp;
using std::log;
using std::tanh;
