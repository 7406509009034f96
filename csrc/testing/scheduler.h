// The grid in flight: its blocks, warps and threads, who may run next, and the report when nobody can.
//
// Each CUDA thread is a fiber. One runs until it must wait (a barrier, a warp collective, an mbarrier) or returns; then
// another one that is ready continues. With seed 0 that goes in turn, one block at a time; with any other the next
// thread is drawn, as are the order of the blocks and how many (1 to 3) are in flight together.
#pragma once
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <source_location>
#include <vector>

#include "stack.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

constexpr int kWarp = 32;
using Where = std::source_location;
// Last parameter of what kernels call: its caller's line, for reports.
#define KVPAGER_HERE emulated::Where where = emulated::Where::current()

struct Block;
struct Warp;

// An asynchronous copy that has not landed: until then its destination holds 0xFF bytes. See async_copies.h.
struct Copy {
  char* to;
  const char* from;
  unsigned bytes, zeros;  // copied; then zero-filled
  uint64_t* barrier;      // told of the bytes when they land; null for cp.async
};

// What a thread waits for.
struct Parked {
  const char* what = nullptr;  // null: for nothing
  Where where;
  uint32_t mask = 0;                                // of a warp collective: the lanes it names
  const void* in = nullptr;                         // what this lane brings
  void* out = nullptr;                              // and takes
  void (*finish)(Warp&, uint32_t lanes) = nullptr;  // writes every lane's `out`
};

struct Thread {
  dim3 index;
  int lane = 0;
  Warp* warp = nullptr;
  Parked parked;
  unsigned barriers = 0, waits = 0;       // block barriers, and waits for copies, met so far
  std::vector<Copy> open;                 // cp.async, not committed
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  Context context;
  std::unique_ptr<void, void (*)(void*)> stack{nullptr, [](void* stack) { munmap(stack, kStackBytes); }};
};

struct Warp {
  Block* block = nullptr;
  Thread* threads = nullptr;      // [32]
  uint32_t alive = 0, ready = 0;  // lanes that have not returned; those of them that may run
  uint32_t at_barrier = 0;        // lanes at the block barrier
};

struct SharedVariable {
  const void* tag;  // the declaration
  char* data;
  size_t bytes;
};

struct Block {
  dim3 index;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int alive = 0, waiting = 0;  // threads that have not returned; those of them at the block barrier
  bool vote_any = false, vote_all = true, any = false, all = true;  // being cast; of the last barrier
  int vote_count = 0, count = 0;
  std::vector<SharedVariable> shared;
  std::vector<Copy> bulk;  // in flight
};

// One launch at a time on an OS thread. Threads and stacks are reused from launch to launch.
struct Device {
  dim3 grid_size, block_size;
  size_t dynamic_shared_bytes = 0;
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<uint64_t> todo;  // numbers of blocks that have not started, the next one last
  size_t num_active = 0;       // resident blocks with living threads; they are the first ones
  Thread* running = nullptr;
  Context caller;
  const std::function<void()>* body = nullptr;
  uint32_t random = 0;  // 0: in turn
  unsigned skip_barrier = 0, skip_wait = 0;

  // A number below `bound`, 0 without a seed.
  unsigned draw(unsigned bound) {
    if (random == 0) return 0;
    random = random * 1664525u + 1013904223u;
    return static_cast<unsigned>(uint64_t{random >> 4} * bound >> 28);
  }
};

// Of the launch that the OS thread is in; null outside. A plain pointer at a fixed place: it is looked at for every
// `threadIdx`, and a thread_local object would be asked each time whether it has been made.
[[gnu::tls_model("initial-exec")]] inline thread_local Device* device = nullptr;

inline Thread& self() { return *device->running; }
inline Block& own_block() { return *device->running->warp->block; }

inline void print_place(const Where& where) {
  const char* name = strrchr(where.file_name(), '/');
  fprintf(stderr, "%s:%u", name ? name + 1 : where.file_name(), where.line());
}

// Lanes that wait for the same thing at the same place, a line each.
inline void report_warp(const Warp& warp, int number) {
  for (uint32_t left = warp.alive; left != 0;) {
    const Parked& first = warp.threads[std::countr_zero(left)].parked;
    uint32_t same = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
      const Parked& other = warp.threads[lane].parked;
      const bool as_first = other.what == first.what && other.mask == first.mask &&
                            (first.what == nullptr || other.where.line() == first.where.line());
      if (left >> lane & 1 && as_first) same |= 1u << lane;
    }
    left &= ~same;
    fprintf(stderr, "  warp %d lanes %08x: ", number, same);
    if (first.what) {
      fprintf(stderr, "%s", first.what);
      if (first.mask) fprintf(stderr, " of lanes %08x", first.mask);
      fprintf(stderr, " at ");
      print_place(first.where);
      fprintf(stderr, "\n");
    } else {
      fprintf(stderr, "may run\n");
    }
  }
}

[[noreturn]] inline void die(const char* reason, const Where* where = nullptr) {
  fprintf(stderr, "emulated GPU: %s", reason);
  if (where) fprintf(stderr, " at "), print_place(*where);
  if (device->running) {
    const Thread& thread = self();
    const dim3 block = thread.warp->block->index;
    fprintf(stderr, " (block %u %u %u, warp %d, lane %d)", block.x, block.y, block.z,
            static_cast<int>(thread.warp - thread.warp->block->warps.data()), thread.lane);
  }
  fprintf(stderr, "\n");
  for (size_t i = 0; i < device->num_active; ++i) {
    const Block& block = *device->resident[i];
    fprintf(stderr, " block %u %u %u: %d threads alive, %d at the block barrier\n", block.index.x, block.index.y,
            block.index.z, block.alive, block.waiting);
    for (size_t w = 0; w < block.warps.size(); ++w) report_warp(block.warps[w], static_cast<int>(w));
  }
  abort();
}

bool land_something();  // an asynchronous copy lands; false: none is in flight (async_copies.h)

// After the running thread in turn, or after a drawn one. Null if none is ready.
inline Thread* next_ready() {
  const size_t blocks = device->num_active;
  size_t start_block = 0;
  for (size_t i = 0; i < blocks; ++i)
    if (device->resident[i].get() == self().warp->block) start_block = i;
  int start_warp = static_cast<int>(self().warp - own_block().warps.data()), start_lane = self().lane + 1;
  if (device->random) {
    start_block = device->draw(static_cast<unsigned>(blocks));
    start_warp = static_cast<int>(device->draw(static_cast<unsigned>(device->resident[start_block]->warps.size())));
    start_lane = static_cast<int>(device->draw(kWarp));
  }
  for (size_t i = 0; i < blocks; ++i) {
    Block& block = *device->resident[(start_block + i) % blocks];
    const int count = static_cast<int>(block.warps.size());
    for (int w = 0; w <= count; ++w) {  // the first warp twice: from start_lane on, and at last from lane 0
      Warp& warp = block.warps[(start_warp + w) % count];
      const uint32_t from = i == 0 && w == 0 && start_lane < kWarp ? ~0u << start_lane : i == 0 && w == 0 ? 0u : ~0u;
      if (const uint32_t ready = warp.ready & from) return &warp.threads[std::countr_zero(ready)];
    }
    start_warp = 0;
  }
  return nullptr;
}

// Lets another thread run; comes back when this one is ready again and its turn comes.
inline void yield() {
  if (device->random && device->draw(4) == 0) land_something();
  Thread* to = next_ready();
  while (to == nullptr) {
    if (!land_something()) die("deadlock");
    to = next_ready();
  }
  Thread* from = device->running;
  if (to == from) return;
  device->running = to;
  switch_context(from->context, to->context);
}

inline void set_ready(Warp& warp, uint32_t lanes) {
  warp.ready |= lanes;
  for (uint32_t left = lanes; left; left &= left - 1) warp.threads[std::countr_zero(left)].parked.what = nullptr;
}

// The running thread waits until somebody calls `set_ready` for it.
inline void park(const Parked& parked) {
  self().parked = parked;
  self().warp->ready &= ~(1u << self().lane);
  yield();
}

inline void release_barrier(Block& block) {
  block.any = block.vote_any, block.all = block.vote_all, block.count = block.vote_count;
  block.vote_any = false, block.vote_all = true, block.vote_count = 0;
  block.waiting = 0;
  for (Warp& warp : block.warps) {
    set_ready(warp, warp.at_barrier);
    warp.at_barrier = 0;
  }
}

// Ends the collective that a lane waits for, if all living lanes that it names have come.
inline void finish_collective_of(Warp& warp, int lane) {
  const Parked parked = warp.threads[lane].parked;
  if (parked.what == nullptr || parked.mask == 0) return;
  const uint32_t lanes = parked.mask & warp.alive;
  if (lanes & warp.ready) return;  // not all: some still run
  uint32_t here = 0;
  for (uint32_t left = lanes; left; left &= left - 1) {
    const int other = std::countr_zero(left);
    const Parked& theirs = warp.threads[other].parked;
    if (theirs.what == nullptr || theirs.mask == 0) continue;
    if (theirs.mask != parked.mask || (theirs.what != parked.what && strcmp(theirs.what, parked.what) != 0))
      die("lanes of one warp in different collectives, or in one with different masks", &theirs.where);
    here |= 1u << other;
  }
  if (here != lanes) return;
  parked.finish(warp, lanes);
  set_ready(warp, lanes);
}

inline void run_thread() {
  entered(device->caller);
  (*device->body)();
  Warp& warp = *self().warp;
  Block& block = *warp.block;
  const uint32_t bit = 1u << self().lane;
  warp.ready &= ~bit;
  warp.alive &= ~bit;
  if (--block.alive > 0) {  // a return may complete what the others wait for
    if (block.waiting == block.alive) release_barrier(block);
    for (uint32_t left = warp.alive; left; left &= left - 1) finish_collective_of(warp, std::countr_zero(left));
  } else {
    device->running = &block.threads[0];
    switch_context(self().context, device->caller);  // the launch starts another block, or ends
  }
  yield();
  abort();  // a finished thread is never resumed
}

}  // namespace emulated
