// The CUDA kernels that move rows: writing tokens into slots, copying blocks, merging two partial results.
#pragma once
#include "../params.h"
#include "errors.cuh"

namespace kvpager::cuda {

constexpr int kMoveThreads = 128;

// grid (num_tokens), block kMoveThreads
template <class T>
__global__ void write_kv_kernel(WriteParams<T> p, unsigned* errors) {
  const int64_t token = blockIdx.x, slot = p.slot_mapping[token];  // the grid is num_tokens wide
  if (slot == -1) return;
  if (slot < 0 || slot >= p.pool.num_blocks * p.pool.block_size) {
    if (threadIdx.x == 0) report(errors, kSlotMapping);
    return;
  }
  // In bounds: 0 <= slot < N * S, so block < N and offset < S; head < K; d < D; token < num_tokens <= rows of key.
  const int64_t block = slot / p.pool.block_size, offset = slot % p.pool.block_size, D = p.pool.head_dim;
  for (int64_t i = threadIdx.x; i < p.pool.num_kv_heads * D; i += kMoveThreads) {
    const int64_t head = i / D, d = i % D;
    p.key_cache.at(block, head, offset)[d] = p.key.at(token, head)[d];
    p.value_cache.at(block, head, offset)[d] = p.value.at(token, head)[d];
  }
}

// grid (num_pairs, slices of a block), block kMoveThreads
template <class T>
__global__ void copy_blocks_kernel(T* data, CopyShape shape, Grid<const int64_t> pairs, unsigned* errors) {
  const int64_t source = pairs.at(blockIdx.x, 0), destination = pairs.at(blockIdx.x, 1);  // the grid is num_pairs wide
  if (source < 0 || source >= shape.num_blocks || destination < 0 || destination >= shape.num_blocks) {
    if (threadIdx.x == 0) report(errors, kPairs);
    return;
  }
  // In bounds: both blocks are in the pool, and offset() of an element below `elements` stays within a block.
  const T* from = data + source * shape.block_stride;
  T* to = data + destination * shape.block_stride;
  const int64_t step = int64_t{gridDim.y} * kMoveThreads;
  for (int64_t element = int64_t{blockIdx.y} * kMoveThreads + threadIdx.x; element < shape.elements; element += step) {
    const int64_t at = shape.offset(element);
    to[at] = from[at];
  }
}

// grid (num_tokens, H), block kMoveThreads
template <class T>
__global__ void merge_attention_kernel(MergeParams<T> p) {
  using A = accumulate_t<T>;
  const int64_t token = blockIdx.x, head = blockIdx.y;  // the grid is [num_tokens, H], the size of every tensor here
  const MergeWeights<A> weights = merge_weights<A>(p.lse_a.at(token, head), p.lse_b.at(token, head));
  __syncthreads();  // `lse` may be `lse_a` or `lse_b`: all have read before one writes
  const T *a = p.out_a.at(token, head), *b = p.out_b.at(token, head);
  T* out = p.out.at(token, head);
  for (int64_t d = threadIdx.x; d < p.head_dim; d += kMoveThreads) {
    // An empty part is not read: it may hold NaN.
    const A part_a = weights.a > 0 ? weights.a * widen(a[d]) : A(0),
            part_b = weights.b > 0 ? weights.b * widen(b[d]) : A(0);
    out[d] = narrow<T>(part_a + part_b);
  }
  if (p.lse.data && threadIdx.x == 0) p.lse.at(token, head) = weights.lse;
}

}  // namespace kvpager::cuda
