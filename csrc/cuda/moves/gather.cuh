// Copying sequences out of the cache into contiguous rows, codes as numbers.
//
// A block per row of `key`, whichever sequence it belongs to: found by bisection, so that the grid depends on shapes
// alone. Numbers are moved in the widest unit that fits, codes are widened one by one: this op serves tools and tests,
// not the steps of an engine. Bytes moved: each row of the sequences once in, once out.
// budget: kernel=gather_kv_kernel registers=40 shared=0 spills=0 threads=128
// budget: kernel=gather_codes_kernel registers=40 shared=0 spills=0 threads=128
#pragma once
#include "../../moves/params.h"
#include "../device/errors.cuh"
#include "../device/units.h"

namespace kvpager::cuda::moves {

constexpr int kGatherThreads = 128;

// Where a row of `key` comes from; position -1: nowhere.
struct GatherPlace {
  int64_t block, offset, position;
};

// The same in every thread. In bounds: num_sequences > 0.
template <class P>
__device__ GatherPlace gather_place(const P& p, int64_t row, unsigned* errors) {
  int64_t low = 0, high = p.num_sequences;  // the last sequence that starts at or before the row
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.seq_start_loc[middle] <= row ? low : high) = middle;
  }
  const int64_t position = row - p.seq_start_loc[low], length = p.seq_lens[low], S = p.pool.block_size;
  if (row >= p.num_rows || position < 0 || position >= length || length > p.max_blocks * S) return {0, 0, -1};
  // In bounds: position < length <= max_blocks * S.
  const int64_t block = p.block_tables.at(low, position / S);
  if (block >= 0 && block < p.pool.num_blocks) return {block, position % S, position};
  if (threadIdx.x == 0) report(errors, kBlockTables);
  return {0, 0, -1};
}

// Lengths and starts of all sequences, by one block.
template <class P>
__device__ void check_gather(const P& p, unsigned* errors) {
  for (int64_t row = threadIdx.x; row < p.num_sequences; row += kGatherThreads) {
    const int64_t length = p.seq_lens[row], start = p.seq_start_loc[row], stop = p.seq_start_loc[row + 1];
    if (length < 0 || length > p.max_blocks * p.pool.block_size)
      report(errors, kSeqLens);
    else if (start < 0 || stop < start + length || stop > p.num_rows)
      report(errors, kSeqStartLoc);
  }
}

// grid (num_rows, at least 1), block kGatherThreads. `p` is in units of U: head_dim and every stride of rows and
// caches.
template <class U>
__global__ void __launch_bounds__(kGatherThreads) gather_kv_kernel(GatherParams<U, U> p, unsigned* errors) {
  if (blockIdx.x == 0) check_gather(p, errors);
  const GatherPlace at = gather_place(p, blockIdx.x, errors);
  if (at.position < 0) return;
  const unsigned units = static_cast<unsigned>(p.pool.head_dim);
  for (unsigned i = threadIdx.x; i < p.pool.num_kv_heads * units; i += kGatherThreads) {
    const unsigned head = i / units, unit = i % units;  // head < K
    p.key.at(blockIdx.x, head)[unit] = p.key_cache.at(at.block, head, at.offset)[unit];
    p.value.at(blockIdx.x, head)[unit] = p.value_cache.at(at.block, head, at.offset)[unit];
  }
}

// grid (num_rows, at least 1), block kGatherThreads
template <class T, class C>
__global__ void __launch_bounds__(kGatherThreads) gather_codes_kernel(GatherParams<T, C> p, unsigned* errors) {
  if (blockIdx.x == 0) check_gather(p, errors);
  if (!scales_are_valid(p, errors)) return;
  const GatherPlace at = gather_place(p, blockIdx.x, errors);
  if (at.position < 0) return;
  const unsigned D = static_cast<unsigned>(p.pool.head_dim);
  for (unsigned i = threadIdx.x; i < p.pool.num_kv_heads * D; i += kGatherThreads) {
    const unsigned head = i / D, d = i % D;  // head < K
    p.key.at(blockIdx.x, head)[d] =
        narrow<T>(widen(p.key_cache.at(at.block, head, at.offset)[d]) * *p.key_scale.at(at.block, head, at.offset));
    p.value.at(blockIdx.x, head)[d] =
        narrow<T>(widen(p.value_cache.at(at.block, head, at.offset)[d]) * *p.value_scale.at(at.block, head, at.offset));
  }
}

}  // namespace kvpager::cuda::moves
