// From what the lanes of a block hold after the last tile to results: straight, or merged over warps and blocks.
#pragma once
#include "lane.cuh"

namespace kvpager::cuda::prefill {

// Where every warp has rows of its own.
template <class T, class C, int kHeadDim, int kRowWarps>
__device__ __forceinline__ void write_rows(const PrefillLane<T, C, kHeadDim, kRowWarps>& own) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!own.exists(half)) continue;
    const int64_t token = own.token_of(half), head = own.head_of(half);
    T* out = own.p.out.at(token, head);
    const float factor = own.value_power / own.total[half];
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const int d = 8 * n + own.lane % 4 * 2;
      if (d < own.p.pool.head_dim)
        *reinterpret_cast<uint32_t*>(out + d) =
            Tensor16<T>::pack(own.sums[n][2 * half] * factor, own.sums[n][2 * half + 1] * factor);
    }
    if (own.p.lse.data && own.lane % 4 == 0)
      own.p.lse.at(token, head) = (own.top[half] + log2_fast(own.total[half])) * kLn2;
  }
}

// Where the positions are cut over blocks as well: leaves the block's partial result of each row, which
// `partial_of_warp` gives by warps, in the workspace; the last block to come merges all.
template <class T, class C, int kHeadDim, int kRowWarps, class F>
__device__ __forceinline__ void merge_blocks(const PrefillLane<T, C, kHeadDim, kRowWarps>& own,
                                             const F& partial_of_warp) {
  // In bounds: the workspace has a place for every block of the grid.
  const int64_t place = (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * own.shared.num_parts;
  float* block_partials = own.shared.partials + place * 16 * (kHeadDim + 2);
  const auto partial_at = [&](int index, int row) { return block_partials + (index * 16 + row) * (kHeadDim + 2); };
  const int D = static_cast<int>(own.p.pool.head_dim);
  for (int i = threadIdx.x; i < own.rows.num_rows * D; i += kPrefillThreads) {
    const Partial part = merged(kPrefillWarps, i / D, i % D, partial_of_warp);
    float* target = partial_at(static_cast<int>(blockIdx.z), i / D);
    target[i % D] = part.sum;
    if (i % D == 0) target[kHeadDim] = part.top, target[kHeadDim + 1] = part.total;
  }
  __threadfence();
  __syncthreads();  // all of the block's partial result is written before it is counted
  unsigned* last = reinterpret_cast<unsigned*>(own.memory);
  if (threadIdx.x == 0)
    *last = atomicAdd(&own.shared.arrivals[place / own.shared.num_parts], 1u) + 1 ==
            static_cast<unsigned>(own.shared.num_parts);
  __syncthreads();
  if (!*last) return;
  __threadfence();
  write_merged(own.p, own.rows, own.kv_head, own.shared.num_parts, [&](int index, int row, int d) {
    const float* part = partial_at(index, row);
    return Partial{__ldcg(part + kHeadDim), __ldcg(part + kHeadDim + 1), __ldcg(part + d)};
  });
}

// Where four warps have the same 16 rows, each over its own positions.
template <class T, class C, int kHeadDim, int kRowWarps>
__device__ __forceinline__ void merge_warps(const PrefillLane<T, C, kHeadDim, kRowWarps>& own) {
  float* tops = reinterpret_cast<float*>(own.memory);  // [warps, 16], then totals [warps, 16], then sums [warps, 16, D]
  float *totals = tops + kPrefillWarps * 16, *parts = totals + kPrefillWarps * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own.warp * 16 + own.lane / 4 + 8 * half;
    if (own.lane % 4 == 0) {
      tops[row] = own.top[half];
      totals[row] = own.total[half];
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        parts[row * kHeadDim + 8 * n + own.lane % 4 * 2 + e] = own.sums[n][2 * half + e] * own.value_power;
  }
  __syncthreads();
  const auto partial_of_warp = [&](int warp_index, int row, int d) {
    const int at = warp_index * 16 + row;
    return Partial{tops[at], totals[at], parts[at * kHeadDim + d]};
  };
  if (own.shared.num_parts == 1)
    write_merged(own.p, own.rows, own.kv_head, kPrefillWarps, partial_of_warp);
  else
    merge_blocks(own, partial_of_warp);
}

}  // namespace kvpager::cuda::prefill
