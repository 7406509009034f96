// What threads do together: block barriers with votes, and the warp's shuffles, ballots and reductions.
//
// Every collective takes the mask of the lanes that take part: those of them that live must all come to the same one
// with the same mask. A lane that reads from one that has returned or is not in the mask stops the test.
#pragma once
#include <algorithm>

#include "scheduler.h"

namespace emulated {

inline void block_barrier(bool vote, const char* what, const Where& where) {
  Block& block = own_block();
  Thread& thread = self();
  block.vote_any |= vote, block.vote_all &= vote, block.vote_count += vote;
  if (++thread.barriers == device->skip_barrier) {
    block.any = block.vote_any, block.all = block.vote_all, block.count = block.vote_count;
    return;
  }
  if (++block.waiting == block.alive) {
    release_barrier(block);
    if (device->random) yield();
  } else {
    thread.warp->at_barrier |= 1u << thread.lane;
    park({.what = what, .where = where});
  }
}

// What the lanes of a collective bring, while its last lane computes what each takes.
template <class In>
struct Brought {
  const Warp& warp;
  uint32_t lanes;
  const In& operator[](int lane) const {
    if (lane < 0 || lane >= kWarp || !(lanes >> lane & 1)) die("a read from a lane that takes no part or has returned");
    return *static_cast<const In*>(warp.threads[lane].parked.in);
  }
};

template <class In, class Out, Out (*combine)(const Brought<In>&, int lane)>
void finish_collective(Warp& warp, uint32_t lanes) {
  const Brought<In> brought{warp, lanes};
  for (int lane = 0; lane < kWarp; ++lane)
    if (lanes >> lane & 1) *static_cast<Out*>(warp.threads[lane].parked.out) = combine(brought, lane);
}

// Brings `in`, waits for the living lanes of `mask`, and takes what `combine` makes for this lane of all.
template <class In, class Out, Out (*combine)(const Brought<In>&, int lane)>
Out collective(const char* what, uint32_t mask, const In& in, const Where& where) {
  Thread& thread = self();
  if (!(mask >> thread.lane & 1)) die("a lane that is not in the mask of its own collective", &where);
  Out out;
  thread.parked = {what, where, mask, &in, &out, finish_collective<In, Out, combine>};
  thread.warp->ready &= ~(1u << thread.lane);
  finish_collective_of(*thread.warp, thread.lane);
  if (thread.parked.what != nullptr || device->random) yield();
  return out;
}

struct Nothing {};

inline Nothing combine_nothing(const Brought<Nothing>&, int) { return {}; }

// A shuffle: the number, and the lane that it is read from.
template <class T>
struct Shuffled {
  T number;
  int source;
};
template <class T>
T combine_shuffle(const Brought<Shuffled<T>>& brought, int lane) {
  return brought[brought[lane].source].number;
}
template <class T>
T shuffle(const char* what, uint32_t mask, T number, int source, const Where& where) {
  return collective<Shuffled<T>, T, combine_shuffle<T>>(what, mask, {number, source}, where);
}

inline uint32_t combine_ballot(const Brought<bool>& brought, int) {
  uint32_t votes = 0;
  for (int lane = 0; lane < kWarp; ++lane)
    if (brought.lanes >> lane & 1 && brought[lane]) votes |= 1u << lane;
  return votes;
}

template <class T, T (*pick)(T, T)>
T combine_reduce(const Brought<T>& brought, int lane) {
  T result = brought[lane];
  for (int other = 0; other < kWarp; ++other)
    if (other != lane && brought.lanes >> other & 1) result = pick(result, brought[other]);
  return result;
}
template <class T>
T add(T a, T b) {
  return a + b;
}
template <class T>
T smaller(T a, T b) {
  return std::min(a, b);
}
template <class T>
T larger(T a, T b) {
  return std::max(a, b);
}

}  // namespace emulated

inline void __syncthreads(KVPAGER_HERE) { emulated::block_barrier(false, "__syncthreads", where); }
inline int __syncthreads_or(int vote, KVPAGER_HERE) {
  emulated::block_barrier(vote != 0, "__syncthreads_or", where);
  return emulated::own_block().any;  // stable: nobody passes the next barrier before all have read this one
}
inline int __syncthreads_and(int vote, KVPAGER_HERE) {
  emulated::block_barrier(vote != 0, "__syncthreads_and", where);
  return emulated::own_block().all;
}
inline int __syncthreads_count(int vote, KVPAGER_HERE) {
  emulated::block_barrier(vote != 0, "__syncthreads_count", where);
  return emulated::own_block().count;
}

inline void __syncwarp(uint32_t mask = 0xffffffffu, KVPAGER_HERE) {
  using emulated::Nothing;
  emulated::collective<Nothing, Nothing, emulated::combine_nothing>("__syncwarp", mask, {}, where);
}

template <class T>
T __shfl_sync(uint32_t mask, T number, int source, int width = 32, KVPAGER_HERE) {
  const int lane = emulated::self().lane;
  return emulated::shuffle("__shfl_sync", mask, number, (lane & ~(width - 1)) | (source & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T number, int lane_mask, int width = 32, KVPAGER_HERE) {
  const int lane = emulated::self().lane, source = lane ^ lane_mask;
  // A lane of a later segment is out of reach: the own number. One of an earlier segment can be read.
  const bool reached = source < (lane & ~(width - 1)) + width;
  return emulated::shuffle("__shfl_xor_sync", mask, number, reached ? source : lane, where);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T number, unsigned delta, int width = 32, KVPAGER_HERE) {
  const int lane = emulated::self().lane, source = lane + static_cast<int>(delta);
  const bool reached = source < (lane & ~(width - 1)) + width;
  return emulated::shuffle("__shfl_down_sync", mask, number, reached ? source : lane, where);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T number, unsigned delta, int width = 32, KVPAGER_HERE) {
  const int lane = emulated::self().lane, source = lane - static_cast<int>(delta);
  const bool reached = source >= (lane & ~(width - 1));
  return emulated::shuffle("__shfl_up_sync", mask, number, reached ? source : lane, where);
}

inline uint32_t __ballot_sync(uint32_t mask, int vote, KVPAGER_HERE) {
  return emulated::collective<bool, uint32_t, emulated::combine_ballot>("__ballot_sync", mask, vote != 0, where);
}
inline int __any_sync(uint32_t mask, int vote, KVPAGER_HERE) { return __ballot_sync(mask, vote, where) != 0; }
inline int __all_sync(uint32_t mask, int vote, KVPAGER_HERE) { return __ballot_sync(mask, !vote, where) == 0; }

template <class T>
T __reduce_add_sync(uint32_t mask, T number, KVPAGER_HERE) {
  return emulated::collective<T, T, emulated::combine_reduce<T, emulated::add<T>>>("__reduce_add_sync", mask, number,
                                                                                   where);
}
template <class T>
T __reduce_min_sync(uint32_t mask, T number, KVPAGER_HERE) {
  return emulated::collective<T, T, emulated::combine_reduce<T, emulated::smaller<T>>>("__reduce_min_sync", mask,
                                                                                       number, where);
}
template <class T>
T __reduce_max_sync(uint32_t mask, T number, KVPAGER_HERE) {
  return emulated::collective<T, T, emulated::combine_reduce<T, emulated::larger<T>>>("__reduce_max_sync", mask, number,
                                                                                      where);
}
