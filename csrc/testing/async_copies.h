// Asynchronous copies into shared memory: cp.async with its groups, bulk copies and the mbarriers that count their
// bytes. The kernels use cp.async alone (prefill); the rest is here, tested by faults.cpp, for kernels that are tried
// on it.
//
// From its issue until it lands the destination of a copy holds 0xFF bytes, whatever was there: a read too early gives
// NaN, and so does a buffer that is refilled while somebody still reads it. A copy lands when somebody waits for it;
// with a seed, at any moment from its issue on. The source is read when the copy lands.
#pragma once
#include "shared_memory.h"

namespace emulated {

// A phase of an mbarrier ends when no arrival is pending and no byte is outstanding.
struct BarrierState {
  uint16_t pending, expected;
  uint32_t phase : 1;
  int32_t bytes : 31;  // announced and not landed; below 0 if they landed before they were announced
};
static_assert(sizeof(BarrierState) == sizeof(uint64_t));

inline BarrierState read_barrier(const uint64_t* barrier) {
  BarrierState state;
  memcpy(&state, barrier, sizeof state);
  return state;
}

// Ends the phase if nothing is missing, and wakes who waits for that.
inline void write_barrier(Block& block, uint64_t* barrier, BarrierState state) {
  if (state.pending == 0 && state.bytes == 0) {
    state.phase ^= 1;
    state.pending = state.expected;
    for (Warp& warp : block.warps)
      for (int lane = 0; lane < kWarp; ++lane)
        if (warp.threads[lane].parked.what && warp.threads[lane].parked.in == barrier) set_ready(warp, 1u << lane);
  }
  memcpy(barrier, &state, sizeof state);
}

inline void land(Block& block, const Copy& copy) {
  if (copy.bytes > 0) memcpy(copy.to, copy.from, copy.bytes);  // else `from` may be nonsense
  memset(copy.to + copy.bytes, 0, copy.zeros);
  if (copy.barrier == nullptr) return;
  BarrierState state = read_barrier(copy.barrier);
  state.bytes -= static_cast<int32_t>(copy.bytes);
  write_barrier(block, copy.barrier, state);
}

inline bool land_one(Block& block, std::vector<Copy>& copies) {
  if (copies.empty()) return false;
  const size_t at = device->draw(static_cast<unsigned>(copies.size()));
  const Copy copy = copies[at];
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(at));
  land(block, copy);
  return true;
}

// A bulk copy of some block, else a cp.async of the running thread.
inline bool land_something() {
  const size_t first = device->draw(static_cast<unsigned>(device->num_active));
  for (size_t i = 0; i < device->num_active; ++i) {
    Block& block = *device->resident[(first + i) % device->num_active];
    if (land_one(block, block.bulk)) return true;
  }
  if (device->random == 0) return false;
  for (std::vector<Copy>& group : self().groups)
    if (land_one(own_block(), group)) return true;
  return land_one(own_block(), self().open);
}

inline bool skips_wait() { return ++self().waits == device->skip_wait; }

// 16 bytes from global to shared memory, the last 16 - `bytes` of them zeros. cp.async.cg.shared.global [to], [from],
// 16, bytes
inline void cp_async_16(void* to, const void* from, unsigned bytes = 16, KVPAGER_HERE) {
  check_shared("cp.async to what is no shared memory of the block", to, 16, where);
  check_aligned("cp.async to an address that is not aligned to 16 bytes", to, 16, where);
  if (bytes > 0) check_aligned("cp.async from an address that is not aligned to 16 bytes", from, 16, where);
  if (bytes > 16) die("cp.async of more than 16 bytes", &where);
  memset(to, 0xFF, 16);
  self().open.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, 16 - bytes, nullptr});
}

inline void cp_async_commit() {
  self().groups.push_back(std::move(self().open));
  self().open.clear();
}

// Waits until at most `pending` of this thread's newest groups are in flight.
template <int pending>
void cp_async_wait() {
  if (skips_wait()) return;
  std::vector<std::vector<Copy>>& groups = self().groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    while (land_one(own_block(), groups.front())) {
    }
    groups.erase(groups.begin());
  }
  if (device->random) yield();
}

inline BarrierState used_barrier(uint64_t* barrier, const Where& where) {
  check_shared("an mbarrier outside the block's shared memory", barrier, 8, where);
  check_aligned("an mbarrier that is not aligned to 8 bytes", barrier, 8, where);
  if (*barrier == ~uint64_t{0}) die("an mbarrier that was not initialised", &where);
  return read_barrier(barrier);
}

inline void mbarrier_init(uint64_t* barrier, unsigned arrivals, KVPAGER_HERE) {
  check_shared("an mbarrier outside the block's shared memory", barrier, 8, where);
  check_aligned("an mbarrier that is not aligned to 8 bytes", barrier, 8, where);
  if (arrivals == 0 || arrivals > 0xffff) die("an mbarrier of no arrivals or too many", &where);
  const auto count = static_cast<uint16_t>(arrivals);
  const BarrierState state{count, count, 0, 0};
  memcpy(barrier, &state, sizeof state);
}

// Arrives, and announces bytes that the phase has to wait for.
inline void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes, KVPAGER_HERE) {
  BarrierState state = used_barrier(barrier, where);
  if (state.pending == 0) die("more arrivals at an mbarrier than it was initialised for", &where);
  --state.pending;
  state.bytes += static_cast<int32_t>(bytes);
  write_barrier(own_block(), barrier, state);
  if (device->random) yield();
}

inline void mbarrier_arrive(uint64_t* barrier, KVPAGER_HERE) { mbarrier_arrive_expect(barrier, 0, where); }

// Whether the phase of this parity has ended; the phase before the first has parity 1.
inline bool mbarrier_test(uint64_t* barrier, unsigned parity, KVPAGER_HERE) {
  if (device->random) yield();
  return used_barrier(barrier, where).phase != (parity & 1);
}

inline void mbarrier_wait(uint64_t* barrier, unsigned parity, KVPAGER_HERE) {
  if (skips_wait()) return;
  if (device->random) yield();
  while (used_barrier(barrier, where).phase == (parity & 1))
    park({.what = "a wait for an mbarrier", .where = where, .in = barrier});
}

// A contiguous run from global to shared memory, counted by the barrier as it lands.
// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [to], [from], bytes, [barrier]
inline void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, KVPAGER_HERE) {
  used_barrier(barrier, where);
  check_shared("a bulk copy to what is no shared memory of the block", to, bytes, where);
  check_aligned("a bulk copy to an address that is not aligned to 16 bytes", to, 16, where);
  check_aligned("a bulk copy from an address that is not aligned to 16 bytes", from, 16, where);
  if (bytes == 0 || bytes % 16) die("a bulk copy of no multiple of 16 bytes", &where);
  memset(to, 0xFF, bytes);
  own_block().bulk.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, 0, barrier});
}

}  // namespace emulated
