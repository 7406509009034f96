// Runs a kernel over a grid, under the schedule that the environment asks for; see emulated_gpu.h.
#pragma once
#include <algorithm>

#include "shared_memory.h"

namespace emulated {

inline unsigned setting(const char* name) {
  const char* text = getenv(name);
  return text ? static_cast<unsigned>(strtoul(text, nullptr, 10)) : 0;
}

// Fresh threads, all ready, at the beginning of the kernel.
inline void start_block(Block& block, uint64_t number) {
  const dim3 grid = device->grid_size, size = device->block_size;
  const unsigned count = size.x * size.y * size.z;
  block.index = dim3(static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                     static_cast<unsigned>(number / grid.x / grid.y));
  if (block.threads.size() < count) block.threads.resize(count);
  block.warps.assign(count / kWarp, Warp());
  block.alive = static_cast<int>(count);
  block.waiting = block.vote_count = 0;
  block.vote_any = false, block.vote_all = true;
  block.bulk.clear();
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = block.threads[i];
    Warp& warp = block.warps[i / kWarp];
    thread.index = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
    thread.lane = static_cast<int>(i % kWarp);
    thread.warp = &warp;
    thread.parked = Parked();
    thread.barriers = thread.waits = 0;
    thread.open.clear();
    thread.groups.clear();
    if (!thread.stack) thread.stack.reset(map_stack());
    if (!thread.stack) die("no memory for a thread's stack");
    prepare(thread.context, thread.stack.get(), run_thread);
    warp.block = &block;
    warp.threads = &block.threads[i / kWarp * kWarp];
    warp.alive |= 1u << thread.lane;
    warp.ready |= 1u << thread.lane;
  }
  make_dynamic_shared(block);
}

inline void finish_block(Block& block) {
  free_shared(block);
  if (!block.bulk.empty()) die("a block has returned before its bulk copies landed");
}

// The numbers of all blocks: from the last to the first, or shuffled.
inline std::vector<uint64_t> order_of_blocks(uint64_t count) {
  std::vector<uint64_t> order(count);
  for (uint64_t i = 0; i < count; ++i) order[i] = count - 1 - i;
  if (device->random)
    for (uint64_t i = count; i > 1; --i) std::swap(order[i - 1], order[device->draw(static_cast<unsigned>(i))]);
  return order;
}

inline void launch(dim3 grid, dim3 block_size, size_t dynamic_shared_bytes, const std::function<void()>& body) {
  static thread_local Device own;
  device = &own;
  const unsigned threads = block_size.x * block_size.y * block_size.z;
  if (threads == 0 || threads % kWarp || threads > 1024) die("a block size that is no multiple of 32 up to 1024");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) die("an invalid grid");
  if (dynamic_shared_bytes > kMaxDynamicShared) die("more dynamic shared memory than 227 KB");
  device->grid_size = grid;
  device->block_size = block_size;
  device->dynamic_shared_bytes = dynamic_shared_bytes;
  device->body = &body;
  device->skip_barrier = setting("KVPAGER_EMULATE_SKIP_BARRIER");
  device->skip_wait = setting("KVPAGER_EMULATE_SKIP_WAIT");
  const unsigned seed = setting("KVPAGER_EMULATE_SEED");
  device->random = seed ? seed * 2654435761u | 1u : 0;
  device->todo = order_of_blocks(uint64_t{grid.x} * grid.y * grid.z);
  const size_t in_flight = std::min<size_t>(1 + device->draw(3), device->todo.size());
  while (device->resident.size() < in_flight) device->resident.push_back(std::make_unique<Block>());
  for (device->num_active = 0; device->num_active < in_flight; ++device->num_active) {
    start_block(*device->resident[device->num_active], device->todo.back());
    device->todo.pop_back();
  }
  while (device->num_active > 0) {
    Thread* to = nullptr;
    device->running = &device->resident[0]->threads.back();
    while ((to = next_ready()) == nullptr)
      if (!land_something()) die("deadlock");
    device->running = to;
    switch_context(device->caller, to->context);  // comes back when a block has ended
    Block& ended = own_block();
    finish_block(ended);
    if (!device->todo.empty()) {
      start_block(ended, device->todo.back());
      device->todo.pop_back();
    } else {
      for (size_t i = 0; i < device->num_active; ++i)
        if (device->resident[i].get() == &ended)
          std::swap(device->resident[i], device->resident[device->num_active - 1]);
      --device->num_active;
    }
  }
  device->running = nullptr;
}

}  // namespace emulated
