// Writing tokens into their slots, as bits: one block per token, each thread moves a unit of K and one of V at a time.
//
// Bytes moved: 2 T K D elements in, as many out. In flight: 2 units (32 bytes) a thread, 64 KB on an SM of 2048
// threads.
// budget: kernel=write_kv_kernel registers=32 shared=0 spills=0 threads=128
// budget: kernel=write_kv_kernel<Unit16 registers=32 shared=0 spills=0 threads=128 loads16=2
#pragma once
#include "../../moves/params.h"
#include "../device/errors.cuh"
#include "../device/units.h"

namespace kvpager::cuda::moves {

constexpr int kWriteThreads = 128;

// The slot of a token, or -1 if nothing is to be written there. The same in every thread; the first of a block reports.
__device__ __forceinline__ int64_t slot_of(const List<int64_t>& slot_mapping, int64_t token, const PoolShape& pool,
                                           unsigned* errors) {
  const int64_t slot = slot_mapping[token];
  if (slot >= -1 && slot < pool.num_blocks * pool.block_size) return slot;
  if (threadIdx.x == 0) report(errors, kSlotMapping);
  return -1;
}

// grid (num_tokens), block kWriteThreads. Strides and head_dim of `p` are in units of U.
template <class U>
__global__ void __launch_bounds__(kWriteThreads) write_kv_kernel(WriteParams<U, U> p, unsigned* errors) {
  const int64_t token = blockIdx.x;  // the grid is num_tokens wide
  const int64_t slot = slot_of(p.slot_mapping, token, p.pool, errors);
  if (slot < 0) return;
  // In bounds: 0 <= slot < N * S, so block < N and offset < S; head < K; unit < D; token < num_tokens <= rows of key.
  const int64_t block = slot / p.pool.block_size, offset = slot % p.pool.block_size;
  const unsigned units = static_cast<unsigned>(p.pool.head_dim);
  const unsigned total = static_cast<unsigned>(p.pool.num_kv_heads) * units;
  for (unsigned i = threadIdx.x; i < total; i += kWriteThreads) {
    const unsigned head = i / units, unit = i % units;
    const U key = p.key.at(token, head)[unit], value = p.value.at(token, head)[unit];
    p.key_cache.at(block, head, offset)[unit] = key;
    p.value_cache.at(block, head, offset)[unit] = value;
  }
}

}  // namespace kvpager::cuda::moves
